"""Llama 3, and the DeepSeek-R1-Distill models made of it: grouped queries, positions stretched by wavelength."""

from __future__ import annotations

from hf_formats.families.family import (
    GROUPED_QUERY_SIZES,
    Family,
    Raw,
    grouped_query_fields,
    grouped_query_problems,
    refused,
)


def problems(raw: Raw) -> list[str]:
    return refused(raw, attention_bias=False, mlp_bias=False) + grouped_query_problems(raw)


FAMILY = Family("llama", "LlamaForCausalLM", GROUPED_QUERY_SIZES, grouped_query_fields, problems)
