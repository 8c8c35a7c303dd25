"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over packed sequences.

Letters: T packed tokens, H hidden, N heads of this rank, D head size without position, R rotary size, C latent size.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.norm import RMSNorm
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.rotary import attention_scale
from megatron.core.transformer.transformer_config import MLATransformerConfig


class MLASelfAttention(nn.Module):
    """[T/TP, H] -> [T/TP, H]: down-projections whole on the sequence shard, up-projections by heads on all tokens."""

    def __init__(self, config: MLATransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.config = config
        self.tp_group = groups.tp
        self.num_heads = heads // groups.tp.size()
        self.softmax_scale = attention_scale(config)
        self.core_attention = ops.core_attention
        self.rotary = ops.rotary_interleaved

        def by_heads(input_size: int, head_size: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                input_size,
                heads * head_size,
                group=groups.tp,
                sequence_parallel=config.sequence_parallel,
                dtype=config.params_dtype,
            )

        query_size = config.qk_head_dim + config.qk_pos_emb_head_dim
        if config.q_lora_rank is None:
            self.linear_q_proj = by_heads(hidden, query_size)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, config.q_lora_rank)
            self.q_layernorm = RMSNorm(config, ops, config.q_lora_rank)
            self.linear_q_up_proj = by_heads(config.q_lora_rank, query_size)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = RMSNorm(config, ops, config.kv_lora_rank)
        self.linear_kv_up_proj = by_heads(config.kv_lora_rank, config.qk_head_dim + config.v_head_dim)
        self.linear_proj = RowParallelLinear(
            heads * config.v_head_dim,
            hidden,
            group=groups.tp,
            sequence_parallel=config.sequence_parallel,
            dtype=config.params_dtype,
        )

    def forward(
        self, x_TH: torch.Tensor, rotary_cos_sin: tuple[torch.Tensor, torch.Tensor], packed_seq_params: PackedSeqParams
    ) -> torch.Tensor:
        q_TND, k_TND, v_TND = self.get_query_key_value_tensors(x_TH, rotary_cos_sin)
        out_TND = self.core_attention(
            q_TND,
            k_TND,
            v_TND,
            packed_seq_params.cu_seqlens,
            packed_seq_params.max_seqlen,
            self.softmax_scale,
            True,
        )
        y_TH: torch.Tensor = self.linear_proj(out_TND.flatten(1))
        return y_TH

    def get_query_key_value_tensors(
        self, x_TH: torch.Tensor, rotary_cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [T, N, D+R] and values [T, N, Dv] of this rank's heads, for all tokens."""
        config = self.config
        cos, sin = rotary_cos_sin
        sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        q_nope, q_rope = self._query(x_TH).unflatten(1, (self.num_heads, -1)).split(sizes, dim=-1)

        latent_TC, k_rope = self.linear_kv_down_proj(x_TH).split([config.kv_lora_rank, sizes[1]], dim=-1)
        kv = self.linear_kv_up_proj(self.kv_layernorm(latent_TC)).unflatten(1, (self.num_heads, -1))
        k_nope, v_TND = kv.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        # All heads share this key. Each rank's gradient covers its own heads only: the gather's backward adds them up.
        k_rope = gather_from_sequence_parallel_region(k_rope, self.tp_group)
        k_rope = self.rotary(k_rope.unsqueeze(1), cos, sin).expand(-1, self.num_heads, -1)

        q_TND = torch.cat([q_nope, self.rotary(q_rope, cos, sin)], dim=-1)
        return q_TND, torch.cat([k_nope, k_rope], dim=-1), v_TND

    def _query(self, x_TH: torch.Tensor) -> torch.Tensor:
        if self.config.q_lora_rank is None:
            query: torch.Tensor = self.linear_q_proj(x_TH)
        else:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x_TH)))
        return query

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill every projection with its part of the tensor of its name under ``name``; norms become ones."""
        for child_name, child in self.named_children():
            if isinstance(child, RMSNorm):
                child.init_weights()
            elif isinstance(child, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
                child.init_weights(init, f"{name}.{child_name}")
