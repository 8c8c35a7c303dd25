"""Qwen3-MoE: every layer has experts; weights of the chosen ones are made to sum to 1 in published models."""

from __future__ import annotations

from typing import Any

from tests.mindspeed_llm.tiny import tiny_decoder_config

_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 24,
    "max_window_layers": 3,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-moe": tiny_decoder_config(**_QWEN3_MOE, norm_topk_prob=True),
    "qwen3-moe, weights as they are": tiny_decoder_config(**_QWEN3_MOE, norm_topk_prob=False),
}
AS_TRANSFORMERS: dict[str, Any] = {}
