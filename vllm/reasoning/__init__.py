"""Reasoning parsers: they divide what a model writes into its thought and its answer."""

from __future__ import annotations

from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser, Qwen3ReasoningParser

REASONING_PARSERS: dict[str, type[DeepSeekR1ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1ReasoningParser,
    "qwen3": Qwen3ReasoningParser,
}
