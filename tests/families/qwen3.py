"""Dense Qwen3: 0.6B to 4B with tied embeddings, larger ones without."""

from __future__ import annotations

from typing import Any

from tests.mindspeed_llm.tiny import tiny_qwen3_config

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": tiny_qwen3_config(),
    "qwen3 tied": tiny_qwen3_config(tie_word_embeddings=True),
}
AS_TRANSFORMERS: dict[str, Any] = {}
