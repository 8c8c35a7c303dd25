"""Qwen2 and Qwen2.5 (0.5B to 3B with tied embeddings) and DeepSeek-R1-Distill-Qwen; YaRN beyond 32k tokens."""

from __future__ import annotations

from typing import Any

from tests.mindspeed_llm.tiny import tiny_decoder_config

_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_window_layers": 3,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": tiny_decoder_config(**_QWEN2),
    "qwen2 tied, yarn": tiny_decoder_config(
        **_QWEN2,
        tie_word_embeddings=True,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        max_position_embeddings=256,
    ),
}
AS_TRANSFORMERS: dict[str, Any] = {}
