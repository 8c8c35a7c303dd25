"""Kimi-K2: one group, few heads, a YaRN whose two bounds are the same."""

from __future__ import annotations

from typing import Any

from tests.mindspeed_llm.tiny import tiny_hf_config

CONFIGS: dict[str, dict[str, Any]] = {
    "kimi-k2": tiny_hf_config(
        model_type="kimi_k2",
        n_group=1,
        topk_group=1,
        n_routed_experts=12,
        num_experts_per_tok=3,
        num_attention_heads=4,
        rope_theta=50000.0,
        rope_scaling={
            "type": "yarn",
            "factor": 32.0,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 128,
        },
        routed_scaling_factor=2.827,
    )
}
AS_TRANSFORMERS: dict[str, Any] = {"model_type": "deepseek_v3"}
