"""Grouped-query attention over a paged cache of keys and values, with a norm on each head of queries and keys.

Letters: T tokens, H hidden, N query heads and G heads of keys and values of this rank, D channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import GroupCoordinator, ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.linear import ColumnParallelLinear, Norm, RowParallelLinear
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.ops.contract import KVCache, RolloutOps
from vllm.transformers_utils.config import Qwen3Config


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values in one product, heads split over TP; with more ranks than heads of keys and values, as
    many ranks as it takes hold the same one.
    """

    def __init__(self, hf: Qwen3Config, ops: RolloutOps, tp: GroupCoordinator) -> None:
        self.head_dim, self.num_copies = hf.head_dim, max(1, tp.world_size // hf.num_key_value_heads)
        kv_rows = hf.num_key_value_heads * self.num_copies * hf.head_dim
        super().__init__(hf.hidden_size, [hf.num_attention_heads * hf.head_dim, kv_rows, kv_rows], ops, tp)

    def weight_views(self, *names: str) -> dict[str, WeightView]:
        result = super().weight_views(*names)
        if self.num_copies > 1:
            shape = (self.out_sizes[1] // self.num_copies, self.in_size)
            first = self.tp.rank_in_group // self.num_copies * self.head_dim
            for name in names[1:]:
                result[name] = replace(result[name], hf_shape=shape, source=(slice(first, first + self.head_dim),))
        return result


class GroupedQueryAttention(nn.Module):
    """N query heads read the keys and values of G heads, N / G of them each."""

    def __init__(self, hf: Qwen3Config, parallel: ParallelState, ops: RolloutOps) -> None:
        super().__init__()
        self.ops, self.eps, self.scale = ops, hf.rms_norm_eps, 1.0 / math.sqrt(hf.head_dim)
        self.qkv_proj = QKVParallelLinear(hf, ops, parallel.tp)
        self.q_norm, self.k_norm = Norm(hf.head_dim), Norm(hf.head_dim)
        self.o_proj = RowParallelLinear(hf.num_attention_heads * hf.head_dim, hf.hidden_size, ops, parallel.tp)

    def forward(
        self,
        x_TH: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        cache: KVCache,
        context: ForwardContext,
        reduce: bool = True,
    ) -> Tensor:
        """[T, H] -> [T, H], summed over TP unless the caller does; writes the tokens' keys and values to the cache."""
        ops, split, parts = self.ops, context.num_decode_tokens, []
        norms = (self.q_norm.weight, self.k_norm.weight, self.eps)
        q_TND = ops.norm_rope_write_gqa(cache, self.qkv_proj(x_TH), *norms, cos_TD, sin_TD, context.slots_T)
        if context.decode is not None:
            parts.append(ops.gqa_decode(q_TND[:split], cache, context.decode, self.scale))
        if context.prefill is not None:
            parts.append(ops.gqa_prefill(q_TND[split:], cache, context.prefill, self.scale))
        out_TND = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(out_TND.reshape(len(x_TH), -1), reduce)

    def weight_views(self, prefix: str) -> dict[str, WeightView]:
        return {
            **self.qkv_proj.weight_views(*(f"{prefix}.{kind}_proj.weight" for kind in "qkv")),
            **self.q_norm.weight_views(f"{prefix}.q_norm.weight"),
            **self.k_norm.weight_views(f"{prefix}.k_norm.weight"),
            **self.o_proj.weight_views(f"{prefix}.o_proj.weight"),
        }
