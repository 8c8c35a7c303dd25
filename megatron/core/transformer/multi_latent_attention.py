"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over packed sequences.

Letters: T packed tokens of this context-parallel rank, H hidden, N heads of this rank, D head size without position,
R rotary size, C latent size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import ContextParallelAttention
from megatron.core.context_parallel.block import keys_of
from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.checkpoint import CheckpointWithoutOutput, checkpoint
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    SequenceToSequenceLinear,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.norm import RMSNorm
from megatron.core.transformer.rotary import attention_scale
from megatron.core.transformer.transformer_config import MLATransformerConfig


class MLASelfAttention(nn.Module):
    """[T/TP, H] -> [T/TP, H]: down-projections to the sequence shard, up-projections by heads on all tokens.

    The weights of the down-projections are whole on every rank, or with the layout's ``mla_down_proj_column_parallel``
    split by their outputs.
    """

    def __init__(self, config: MLATransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        super().__init__()
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.config = config
        self.tp_group = groups.tp
        self.num_heads = heads // groups.tp.size()
        self.core_attention = ContextParallelAttention(groups, ops, attention_scale(config), config.cp_comm_type)
        self.recomputes_attention = config.recomputes("core_attn") and not self.core_attention.keeps_only_inputs
        self.sends_latents = config.cp_send_latents and groups.cp.size() > 1
        self.parameters_read_here = ("linear_kv_up_proj.weight",) if self.sends_latents else ()
        self.rotary = ops.rotary_interleaved

        def by_heads(input_size: int, head_size: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(config, groups, ops, input_size, heads * head_size)

        def down(output_size: int) -> nn.Module:
            if groups.layout.mla_down_proj_column_parallel:
                return SequenceToSequenceLinear(config, groups, ops, hidden, output_size)
            return ReplicatedLinear(config, ops, hidden, output_size)

        query_size = config.qk_head_dim + config.qk_pos_emb_head_dim
        if config.q_lora_rank is None:
            self.linear_q_proj = by_heads(hidden, query_size)
        else:
            self.linear_q_down_proj = down(config.q_lora_rank)
            self.q_layernorm = RMSNorm(config, ops, config.q_lora_rank)
            self.linear_q_up_proj = by_heads(config.q_lora_rank, query_size)
        self.linear_kv_down_proj = down(config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = RMSNorm(config, ops, config.kv_lora_rank)
        self.linear_kv_up_proj = by_heads(config.kv_lora_rank, config.qk_head_dim + config.v_head_dim)
        self.linear_proj = RowParallelLinear(config, groups, ops, heads * config.v_head_dim, hidden)

    def forward(
        self, x_TH: Tensor, rotary_cos_sin: tuple[Tensor, Tensor], packed_seq_params: PackedSeqParams
    ) -> Tensor:
        up_projection = CheckpointWithoutOutput(self.config.recomputes("mla_up_proj"))
        projected = up_projection.checkpoint(self.up_project, *self.down_project(x_TH), *rotary_cos_sin)
        if self.recomputes_attention and torch.is_grad_enabled():
            out_TND = checkpoint(self._attend, packed_seq_params, *projected)
        else:
            out_TND = self._attend(packed_seq_params, *projected)
        up_projection.discard_output_and_register_recompute(out_TND)
        y_TH: Tensor = self.linear_proj(out_TND.flatten(1))
        return y_TH

    def _attend(self, packed_seq_params: PackedSeqParams, *projected: Tensor) -> Tensor:
        """Return [T, N, Dv] from the results of ``up_project``."""
        if self.sends_latents:
            q_TND, latent_TC, k_rope = projected
            weight, size = self.linear_kv_up_proj.weight, self.config.v_head_dim
            return self.core_attention.attend_to_latents(q_TND, latent_TC, k_rope, weight, packed_seq_params, size)
        q_TND, k_TND, v_TND, *rest_of_k = projected
        return self.core_attention(q_TND, k_TND, v_TND, packed_seq_params, *rest_of_k)

    def down_project(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries' input (their latents, or x), latents of keys and values [T/TP, C], and rotary keys."""
        query_input = x_TH if self.config.q_lora_rank is None else self.linear_q_down_proj(x_TH)
        sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent_TC, k_rope = self.linear_kv_down_proj(x_TH).split(sizes, dim=-1)
        return query_input, latent_TC, k_rope

    def up_project(
        self, query_input: Tensor, latent_TC: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries and keys [T, N, D+R] and values [T, N, Dv] of this rank's heads.

        With context parallelism keys are [T, N, D], and what all heads share [T, 1, R] comes after the values; with
        ``cp_send_latents`` there is the latent [T, C] in the place of keys and values.
        """
        config = self.config
        if config.q_lora_rank is None:
            query = self.linear_q_proj(query_input)
        else:
            query = self.linear_q_up_proj(self.q_layernorm(query_input))
        sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        q_nope, q_rope = query.unflatten(1, (self.num_heads, -1)).split(sizes, dim=-1)

        # All heads share this key. Each rank's gradient covers its own heads only: the gather's backward adds them up.
        k_rope = gather_from_sequence_parallel_region(k_rope, self.tp_group)
        k_rope = self.rotary(k_rope.unsqueeze(1), cos, sin)

        q_TND = torch.cat([q_nope, self.rotary(q_rope, cos, sin)], dim=-1)
        latent_TC = self.kv_layernorm(latent_TC)
        if self.sends_latents:
            return q_TND, gather_from_sequence_parallel_region(latent_TC, self.tp_group), k_rope
        kv = self.linear_kv_up_proj(latent_TC).unflatten(1, (self.num_heads, -1))
        k_nope, v_TND = kv.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        if self.core_attention.group.size() == 1:
            return q_TND, keys_of((k_nope, v_TND, k_rope)), v_TND
        return q_TND, k_nope, v_TND, k_rope
