"""Llama 3.x: positions stretched by wavelength; 3.2 with tied embeddings and a head size of its own."""

from __future__ import annotations

from typing import Any

from tests.mindspeed_llm.tiny import tiny_decoder_config

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_decoder_config(**_LLAMA),
    "llama tied, head size": tiny_decoder_config(**_LLAMA, tie_word_embeddings=True, head_dim=24),
}
AS_TRANSFORMERS: dict[str, Any] = {}
