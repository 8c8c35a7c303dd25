"""Llama 3, and the DeepSeek-R1-Distill models made of it: grouped queries, positions stretched by wavelength."""

from __future__ import annotations

from hf_formats.families import family as parts
from hf_formats.families.family import Family, Raw


def problems(raw: Raw) -> list[str]:
    return parts.refused(raw, attention_bias=False, mlp_bias=False) + parts.grouped_query_problems(raw)


FAMILY = Family("llama", "LlamaForCausalLM", parts.GROUPED_QUERY_SIZES, parts.grouped_query_fields, problems)
