"""GLM-4.5 and 4.6: grouped queries of which half a head is turned, then experts routed as DeepSeek-V3 does it."""

from __future__ import annotations

from hf_formats.families.family import (
    EXPERT_SIZES,
    GROUPED_QUERY_SIZES,
    Family,
    Fields,
    Raw,
    expert_fields,
    expert_problems,
    grouped_query_fields,
    grouped_query_problems,
    partial_rotary_factor,
)


def fields(raw: Raw) -> Fields:
    of_heads = {"attention_bias": bool(raw.get("attention_bias")), "qk_norm": bool(raw.get("use_qk_norm"))}
    return grouped_query_fields(raw) | of_heads | expert_fields(raw, "noaux_tc", "sigmoid", norm_topk_prob=True)


def problems(raw: Raw) -> list[str]:
    found = [] if partial_rotary_factor(raw) else ["partial_rotary_factor is missing"]
    found += expert_problems(raw, "first_k_dense_replace", "routed_scaling_factor")
    return found + grouped_query_problems(raw)


FAMILY = Family("glm4_moe", "Glm4MoeForCausalLM", GROUPED_QUERY_SIZES + EXPERT_SIZES, fields, problems)
