"""Qwen2 and Qwen2.5, and the DeepSeek-R1-Distill models made of them: biases on queries, keys and values."""

from __future__ import annotations

from hf_formats.families import family as parts
from hf_formats.families.family import Family, Fields, Raw


def fields(raw: Raw) -> Fields:
    return parts.grouped_query_fields(raw) | {"attention_bias": True}


FAMILY = Family("qwen2", "Qwen2ForCausalLM", parts.GROUPED_QUERY_SIZES, fields, parts.grouped_query_problems)
