"""Grouped-query attention over a paged cache of keys and values.

Letters: T tokens, H hidden, N query heads and G heads of keys and values of this rank, D channels of a head, R of them
turned by positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import GroupCoordinator, ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.linear import ColumnParallelLinear, Norm, RowParallelLinear, empty_parameter
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.ops.contract import Angles, HeadNorms, KVCache, RolloutOps
from vllm.transformers_utils.config import HFConfig


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values in one product, heads split over TP; with more ranks than heads of keys and values, as
    many ranks as it takes hold the same one. Who writes the cache adds the bias.
    """

    def __init__(self, hf: HFConfig, ops: RolloutOps, tp: GroupCoordinator) -> None:
        self.head_dim, self.num_copies = hf.head_dim, max(1, tp.world_size // hf.num_key_value_heads)
        kv_rows = hf.num_key_value_heads * self.num_copies * hf.head_dim
        super().__init__(hf.hidden_size, [hf.num_attention_heads * hf.head_dim, kv_rows, kv_rows], ops, tp)
        self.bias = empty_parameter(sum(self.out_sizes) // tp.world_size) if hf.attention_bias else None

    def weight_views(self, *names: str) -> dict[str, WeightView]:
        """Targets of the weights of q, k and v, and of their biases."""
        result = super().weight_views(*names)
        if self.num_copies > 1:
            first = self.tp.rank_in_group // self.num_copies * self.head_dim
            for name in names[1:]:
                shape = (self.out_sizes[1] // self.num_copies, self.in_size)
                result[name] = replace(
                    result[name], hf_shape=shape, ranges=((first, first + self.head_dim), (0, self.in_size))
                )
        return result if self.bias is None else result | self._bias_views(result, self.bias)

    def _bias_views(self, weights: dict[str, WeightView], bias: nn.Parameter) -> dict[str, WeightView]:
        views, row = {}, 0
        for (name, view), size in zip(weights.items(), self.out_sizes, strict=True):
            rows = slice(row, row + size // self.tp.world_size)
            views[f"{name.removesuffix('weight')}bias"] = WeightView(
                view.hf_shape[:1], view.ranges[:1], bias.dtype, bias, (rows,)
            )
            row = rows.stop
        return views


class GroupedQueryAttention(nn.Module):
    """N query heads read the keys and values of G heads, N / G of them each."""

    def __init__(self, hf: HFConfig, parallel: ParallelState, ops: RolloutOps) -> None:
        super().__init__()
        self.ops, self.eps, self.scale = ops, hf.rms_norm_eps, hf.rope.softmax_scale(hf.head_dim)
        self.head_dim = hf.head_dim
        self.qkv_proj = QKVParallelLinear(hf, ops, parallel.tp)
        self.q_norm = Norm(hf.head_dim) if hf.qk_norm else None
        self.k_norm = Norm(hf.head_dim) if hf.qk_norm else None
        self.o_proj = RowParallelLinear(hf.num_attention_heads * hf.head_dim, hf.hidden_size, ops, parallel.tp)

    def forward(
        self, x_TH: Tensor, angles: Angles, cache: KVCache, context: ForwardContext, reduce: bool = True
    ) -> Tensor:
        """[T, H] -> [T, H], of the tokens that the context keeps; writes all tokens' keys and values to the cache.

        The result is summed over TP unless the caller does it.
        """
        ops, split, parts = self.ops, context.num_decode_tokens, []
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.eps)
        qkv_TMD, bias_C = self.qkv_proj(x_TH).unflatten(1, (-1, self.head_dim)), self.qkv_proj.bias
        bias_MD = None if bias_C is None else bias_C.view(-1, self.head_dim)
        q_TND = ops.rope_write_gqa(cache, qkv_TMD, bias_MD, norms, angles, context.slots_T)
        if context.sampled_B is not None:
            q_TND = q_TND.index_select(0, context.sampled_B)
        if context.decode is not None:
            parts.append(ops.gqa_decode(q_TND[:split], cache, context.decode, self.scale))
        if context.prefill is not None:
            parts.append(ops.gqa_prefill(q_TND[split:], cache, context.prefill, self.scale))
        out_TND = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(out_TND.flatten(1), reduce)

    def weight_views(self, prefix: str) -> dict[str, WeightView]:
        views = self.qkv_proj.weight_views(*(f"{prefix}.{kind}_proj.weight" for kind in "qkv"))
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                views |= norm.weight_views(f"{prefix}.{name}.weight")
        return views | self.o_proj.weight_views(f"{prefix}.o_proj.weight")
