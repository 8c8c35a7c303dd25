"""DeepSeek-V2 and DeepSeek-V3: latent attention, first layers dense, then mixtures of experts.

Numerics as transformers' DeepseekV2ForCausalLM and DeepseekV3ForCausalLM.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.fused_moe import DeepseekMLP, FusedMoE
from vllm.model_executor.layers.linear import Norm
from vllm.model_executor.layers.mla import MultiHeadLatentAttention
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import KVCache, RolloutOps
from vllm.transformers_utils.config import DeepseekV3Config


class DeepseekV2DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, hf: DeepseekV3Config, layer: int, parallel: ParallelState, ops: RolloutOps) -> None:
        super().__init__()
        self.ops, self.eps = ops, hf.rms_norm_eps
        self.input_layernorm = Norm(hf.hidden_size)
        self.self_attn = MultiHeadLatentAttention(hf, parallel, ops)
        self.post_attention_layernorm = Norm(hf.hidden_size)
        self.mlp: DeepseekMLP | FusedMoE
        if layer < hf.first_k_dense_replace:
            self.mlp = DeepseekMLP(hf.hidden_size, hf.intermediate_size, parallel, ops)
        else:
            self.mlp = FusedMoE(hf, parallel, ops)

    def forward(self, x_TH: Tensor, cos_TR: Tensor, sin_TR: Tensor, cache: KVCache, context: ForwardContext) -> Tensor:
        if len(x_TH) == 0:
            # Every rank reaches an expert layer, also with no token of its own: the other replicas wait there.
            return self.mlp(x_TH, context) if isinstance(self.mlp, FusedMoE) else x_TH
        normed_TH = self.ops.rms_norm(x_TH, self.input_layernorm.weight, self.eps)
        attended_TH = self.self_attn(normed_TH, cos_TR, sin_TR, cache, context)
        if context.sampled_B is not None:
            x_TH = x_TH.index_select(0, context.sampled_B)
        normed_TH, x_TH = self.ops.add_rms_norm(attended_TH, x_TH, self.post_attention_layernorm.weight, self.eps)
        if isinstance(self.mlp, FusedMoE):
            return self.mlp(normed_TH, context).add_(x_TH)
        return self.ops.add_layer(x_TH, self.mlp, normed_TH)

    def weight_views(self, prefix: str) -> dict[str, WeightView]:
        return {
            **self.input_layernorm.weight_views(f"{prefix}.input_layernorm.weight"),
            **self.self_attn.weight_views(f"{prefix}.self_attn"),
            **self.post_attention_layernorm.weight_views(f"{prefix}.post_attention_layernorm.weight"),
            **self.mlp.weight_views(f"{prefix}.mlp"),
        }


class DeepseekV2ForCausalLM(CausalLM):
    """See `CausalLM`."""

    hf: DeepseekV3Config

    @property
    def prunes_last_layer(self) -> bool:
        return self.ops.prefill_equals_decode

    def make_layer(self, layer: int, parallel: ParallelState) -> DeepseekV2DecoderLayer:
        return DeepseekV2DecoderLayer(self.hf, layer, parallel, self.ops)

    def new_kv_cache(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, layout: str
    ) -> KVCache:
        sizes = (num_blocks, block_size, self.hf.kv_lora_rank, self.hf.qk_rope_head_dim)
        return self.ops.new_kv_cache(*sizes, dtype, device, layout)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3 and Moonlight: its routing is in the config."""
