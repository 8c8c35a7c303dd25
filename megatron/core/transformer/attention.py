"""Grouped-query attention (arXiv 2305.13245) over packed sequences, with rotary positions and per-head norms.

Letters: T packed tokens of this context-parallel rank, H hidden, N query heads of this rank, G heads of keys and values
of this rank, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import ContextParallelAttention
from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.checkpoint import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.norm import RMSNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class SelfAttention(nn.Module):
    """[T/TP, H] -> [T/TP, H]; linear_qkv holds, group by group, its query heads, its key and its value."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        super().__init__()
        self.config = config
        scale = 1.0 / math.sqrt(config.head_size)
        self.core_attention = ContextParallelAttention(groups, ops, scale, config.cp_comm_type)
        self.recomputes_attention = config.recomputes("core_attn") and not self.core_attention.keeps_only_inputs
        self.rotary = ops.rotary_interleaved
        self.num_groups = config.query_groups // groups.tp.size()
        heads, hidden, size = config.num_attention_heads, config.hidden_size, config.head_size
        self.heads_per_group = heads // config.query_groups
        self.linear_qkv = ColumnParallelLinear(config, groups, ops, hidden, (heads + 2 * config.query_groups) * size)
        self.q_layernorm = RMSNorm(config, ops, size) if config.qk_layernorm else None
        self.k_layernorm = RMSNorm(config, ops, size) if config.qk_layernorm else None
        self.linear_proj = RowParallelLinear(config, groups, ops, heads * size, hidden)

    def forward(
        self, x_TH: Tensor, rotary_cos_sin: tuple[Tensor, Tensor], packed_seq_params: PackedSeqParams
    ) -> Tensor:
        arguments = (*self.get_query_key_value_tensors(x_TH, rotary_cos_sin), packed_seq_params)
        if self.recomputes_attention and torch.is_grad_enabled():
            out_TND = checkpoint(self.core_attention, *arguments)
        else:
            out_TND = self.core_attention(*arguments)
        y_TH: Tensor = self.linear_proj(out_TND.flatten(1))
        return y_TH

    def get_query_key_value_tensors(
        self, x_TH: Tensor, rotary_cos_sin: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, D], keys and values [T, G, D] of this rank's heads, for all tokens of the TP group."""
        size = self.config.head_size
        qkv = self.linear_qkv(x_TH).unflatten(1, (self.num_groups, self.heads_per_group + 2, size))
        q, k, v = qkv.split([self.heads_per_group, 1, 1], dim=2)
        q_TND, k_TGD, v_TGD = q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_TND, k_TGD = self.q_layernorm(q_TND), self.k_layernorm(k_TGD)
        q_TND, k_TGD = self._rotate(q_TND, rotary_cos_sin), self._rotate(k_TGD, rotary_cos_sin)
        return q_TND, k_TGD, v_TGD

    def _rotate(self, x_TND: Tensor, rotary_cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Element i turns with element i + D/2: as neighbours, in an order that queries and keys share."""
        if not self.config.rotary_interleaved:
            x_TND = x_TND.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return self.rotary(x_TND, *rotary_cos_sin)
