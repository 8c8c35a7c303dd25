"""Dense Qwen3: grouped queries with a norm on each head of queries and keys."""

from __future__ import annotations

from hf_formats.families.family import (
    GROUPED_QUERY_SIZES,
    Family,
    Fields,
    Raw,
    grouped_query_fields,
    grouped_query_problems,
    refused,
)


def fields(raw: Raw) -> Fields:
    return grouped_query_fields(raw) | {"qk_norm": True}


def problems(raw: Raw) -> list[str]:
    return refused(raw, attention_bias=False) + grouped_query_problems(raw)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", GROUPED_QUERY_SIZES, fields, problems)
