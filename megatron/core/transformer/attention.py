"""Grouped-query attention (arXiv 2305.13245) over packed sequences, with rotary positions.

Letters: T packed tokens of this context-parallel rank, H hidden, N query heads of this rank, G heads of keys and values
of this rank, D head size, R channels of a head that positions turn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import ContextParallelAttention
from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.checkpoint import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.norm import RMSNorm
from megatron.core.transformer.rotary import attention_scale
from megatron.core.transformer.transformer_config import TransformerConfig


class SelfAttention(nn.Module):
    """[T/TP, H] -> [T/TP, H]; linear_qkv holds, group by group, its query heads, its key and its value.

    Its rows are cut into equal parts. With fewer groups than TP ranks a part is not a whole group: the outputs are then
    gathered, and every rank takes its query heads, and the key and the value that they share with other ranks' heads.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        super().__init__()
        self.config = config
        self.core_attention = ContextParallelAttention(groups, ops, attention_scale(config), config.cp_comm_type)
        self.recomputes_attention = config.recomputes("core_attn") and not self.core_attention.keeps_only_inputs
        self.rotary = ops.rotary_interleaved
        heads, hidden, size = config.num_attention_heads, config.hidden_size, config.head_size
        self.tp, self.heads_per_group = groups.tp, heads // config.query_groups
        self.ranks_per_group = max(1, groups.tp.size() // config.query_groups)
        rows = (heads + 2 * config.query_groups) * size
        self.linear_qkv = ColumnParallelLinear(config, groups, ops, hidden, rows, bias=config.add_qkv_bias)
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
        qkv, size = self.linear_qkv(x_TH), self.config.head_size
        if self.ranks_per_group > 1:
            qkv = gather_from_tensor_model_parallel_region(qkv, self.tp)
        groups = qkv.unflatten(1, (-1, self.heads_per_group + 2, size))
        q, k, v = groups.split([self.heads_per_group, 1, 1], dim=2)
        if self.ranks_per_group > 1:
            group, part = divmod(self.tp.rank(), self.ranks_per_group)
            q = q[:, group : group + 1].chunk(self.ranks_per_group, dim=2)[part]
            k, v = k[:, group : group + 1], v[:, group : group + 1]
        q_TND, k_TGD, v_TGD = q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_TND, k_TGD = self.q_layernorm(q_TND), self.k_layernorm(k_TGD)
        q_TND, k_TGD = self._rotate(q_TND, rotary_cos_sin), self._rotate(k_TGD, rotary_cos_sin)
        return q_TND, k_TGD, v_TGD

    def _rotate(self, x_TND: Tensor, rotary_cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Element i turns with element i + R/2: as neighbours, in an order that queries and keys share."""
        x_TNR, kept = x_TND.tensor_split((self.config.rope_dim,), dim=-1)
        if not self.config.rotary_interleaved:
            x_TNR = x_TNR.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        x_TNR = self.rotary(x_TNR, *rotary_cos_sin)
        return torch.cat((x_TNR, kept), dim=-1) if kept.shape[-1] else x_TNR
