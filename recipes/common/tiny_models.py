"""The tiny models that recipes start from where no model is given: the form of a family, as small as possible."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common import tokenizer
from recipes.common.tokenizer import ChatForm


@dataclass(frozen=True)
class TinyModel:
    """directory: with config.json, and generation_config.json where the family has one · chat: its tokenizer's tokens
    and template · is_fp8: it is written in FP8 blocks with an MTP layer, as DeepSeek publishes; else in BF16.
    """

    directory: Path
    chat: ChatForm
    is_fp8: bool

    @property
    def config(self) -> dict[str, Any]:
        """The content of its config.json."""
        config: dict[str, Any] = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        return config


_HERE = Path(__file__).parent
# 0.8 million parameters each, 1.5 of Qwen3-MoE. Weights start with a width of 1 / sqrt(hidden_size): with the 0.006 or
# 0.02 of the real models so narrow a model learns very slowly.
DEEPSEEK_V3 = TinyModel(_HERE / "tiny_model", tokenizer.DEEPSEEK, is_fp8=True)
QWEN3 = TinyModel(_HERE / "tiny_qwen3", tokenizer.CHATML, is_fp8=False)
QWEN3_MOE = TinyModel(_HERE / "tiny_qwen3_moe", tokenizer.CHATML, is_fp8=False)
