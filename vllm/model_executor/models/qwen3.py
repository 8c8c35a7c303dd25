"""Dense Qwen3: grouped-query attention with normed heads. Numerics as transformers' Qwen3ForCausalLM."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention import GroupedQueryAttention
from vllm.model_executor.layers.fused_moe import DeepseekMLP
from vllm.model_executor.layers.linear import Norm
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import KVCache, RolloutOps
from vllm.transformers_utils.config import Qwen3Config


class Qwen3DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, hf: Qwen3Config, parallel: ParallelState, ops: RolloutOps) -> None:
        super().__init__()
        self.ops, self.eps = ops, hf.rms_norm_eps
        self.input_layernorm = Norm(hf.hidden_size)
        self.self_attn = GroupedQueryAttention(hf, parallel, ops)
        self.post_attention_layernorm = Norm(hf.hidden_size)
        self.mlp = DeepseekMLP(hf.hidden_size, hf.intermediate_size, parallel, ops)

    def forward(self, x_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: KVCache, context: ForwardContext) -> Tensor:
        if len(x_TH) == 0:
            return x_TH
        normed_TH = self.ops.rms_norm(x_TH, self.input_layernorm.weight, self.eps)
        attended_TH = self.self_attn(normed_TH, cos_TD, sin_TD, cache, context)
        normed_TH, x_TH = self.ops.add_rms_norm(attended_TH, x_TH, self.post_attention_layernorm.weight, self.eps)
        return self.ops.add_layer(x_TH, self.mlp, normed_TH)

    def weight_views(self, prefix: str) -> dict[str, WeightView]:
        return {
            **self.input_layernorm.weight_views(f"{prefix}.input_layernorm.weight"),
            **self.self_attn.weight_views(f"{prefix}.self_attn"),
            **self.post_attention_layernorm.weight_views(f"{prefix}.post_attention_layernorm.weight"),
            **self.mlp.weight_views(f"{prefix}.mlp"),
        }


class Qwen3ForCausalLM(CausalLM):
    """See `CausalLM`."""

    hf: Qwen3Config

    def make_layer(self, layer: int, parallel: ParallelState) -> Qwen3DecoderLayer:
        return Qwen3DecoderLayer(self.hf, parallel, self.ops)

    def new_kv_cache(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, layout: str
    ) -> KVCache:
        assert layout == "nd", layout  # the config refuses others
        num_heads = self.hf.kv_heads_of_rank(self.tp_size)
        return self.ops.new_gqa_cache(num_blocks, block_size, num_heads, self.hf.head_dim, dtype, device)
