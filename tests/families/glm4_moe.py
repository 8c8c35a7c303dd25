"""GLM-4.5-Air (biases of q, k and v) and GLM-4.5 (norms of heads too)."""

from __future__ import annotations

from typing import Any

from tests.mindspeed_llm.tiny import tiny_decoder_config

_GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 24,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.5,
    "topk_group": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4-moe": tiny_decoder_config(**_GLM, use_qk_norm=True),
    "glm4-moe air": tiny_decoder_config(**_GLM, use_qk_norm=False),
}
AS_TRANSFORMERS: dict[str, Any] = {}
