"""Qwen2 and Qwen2.5, and the DeepSeek-R1-Distill models made of them: biases on queries, keys and values."""

from __future__ import annotations

from hf_formats.families.family import (
    GROUPED_QUERY_SIZES,
    Family,
    Fields,
    Raw,
    grouped_query_fields,
    grouped_query_problems,
)


def fields(raw: Raw) -> Fields:
    return grouped_query_fields(raw) | {"attention_bias": True}


FAMILY = Family("qwen2", "Qwen2ForCausalLM", GROUPED_QUERY_SIZES, fields, grouped_query_problems)
