"""DeepSeek-V3: latent attention, first layers dense, then mixtures of experts.

Numerics as transformers' DeepseekV3ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.fused_moe import DeepseekMLP, FusedMoE
from vllm.model_executor.layers.linear import Norm, ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.mla import MultiHeadLatentAttention
from vllm.model_executor.layers.rotary_embedding import RotaryTable
from vllm.model_executor.model_loader.weight_target import WeightTarget, load_weights
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
        normed_TH, x_TH = self.ops.add_rms_norm(attended_TH, x_TH, self.post_attention_layernorm.weight, self.eps)
        if isinstance(self.mlp, FusedMoE):
            return x_TH + self.mlp(normed_TH, context)
        return self.mlp(normed_TH).add_(x_TH)

    def targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {
            **self.input_layernorm.targets(f"{prefix}.input_layernorm.weight"),
            **self.self_attn.targets(f"{prefix}.self_attn"),
            **self.post_attention_layernorm.targets(f"{prefix}.post_attention_layernorm.weight"),
            **self.mlp.targets(f"{prefix}.mlp"),
        }


class DeepseekV3ForCausalLM(nn.Module):
    """This rank's part of the model. Parameters are empty until `load_weights`."""

    def __init__(
        self, hf: DeepseekV3Config, max_model_len: int, parallel: ParallelState, ops: RolloutOps, device: torch.device
    ) -> None:
        super().__init__()
        self.hf, self.ops = hf, ops
        self.embed_tokens = VocabParallelEmbedding(hf.vocab_size, hf.hidden_size, parallel.tp)
        self.layers = nn.ModuleList(
            DeepseekV2DecoderLayer(hf, layer, parallel, ops) for layer in range(hf.num_hidden_layers)
        )
        self.norm = Norm(hf.hidden_size)
        self.lm_head = ParallelLMHead(hf.vocab_size, hf.hidden_size, ops, parallel.tp)
        self.rotary = RotaryTable(hf.rope, hf.qk_rope_head_dim, max_model_len, device)
        self.weight_targets = self._targets()

    def forward(self, ids_T: Tensor, kv_caches: list[KVCache], context: ForwardContext) -> Tensor:
        """Hidden states [T, H] before the final norm. ids_T int64 [T]; kv_caches holds one cache per layer."""
        x_TH = self.embed_tokens(ids_T)
        cos_TR, sin_TR = self.rotary.at(context.positions_T)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x_TH = layer(x_TH, cos_TR, sin_TR, cache, context)
        return x_TH

    def compute_logits(self, x_BH: Tensor) -> Tensor:
        """fp32 [B, V] next-token logits of hidden states [B, H]."""
        return self.lm_head(self.ops.rms_norm(x_BH, self.norm.weight, self.hf.rms_norm_eps))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take (hf_name, full tensor) pairs, any part of the model in any order; returns the names taken."""
        return load_weights(self.weight_targets, self.hf.num_hidden_layers, weights)

    def _targets(self) -> dict[str, WeightTarget]:
        targets = self.embed_tokens.targets("model.embed_tokens.weight")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DeepseekV2DecoderLayer)
            targets |= layer.targets(f"model.layers.{index}")
        return targets | self.norm.targets("model.norm.weight") | self.lm_head.targets("lm_head.weight")
