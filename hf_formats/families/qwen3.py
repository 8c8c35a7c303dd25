"""Dense Qwen3: grouped queries with a norm on each head of queries and keys."""

from __future__ import annotations

from hf_formats.families import family as parts
from hf_formats.families.family import Family, Fields, Raw


def fields(raw: Raw) -> Fields:
    return parts.grouped_query_fields(raw) | {"qk_norm": True}


def problems(raw: Raw) -> list[str]:
    return parts.refused(raw, attention_bias=False) + parts.grouped_query_problems(raw)


FAMILY = Family("qwen3", "Qwen3ForCausalLM", parts.GROUPED_QUERY_SIZES, fields, problems)
