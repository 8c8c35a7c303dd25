"""GLM-4.5 and 4.6: grouped queries of which half a head is turned, then experts routed as DeepSeek-V3 does it."""

from __future__ import annotations

from hf_formats.families import family as parts
from hf_formats.families.family import Family, Fields, Raw


def fields(raw: Raw) -> Fields:
    of_heads = {"attention_bias": bool(raw.get("attention_bias")), "qk_norm": bool(raw.get("use_qk_norm"))}
    of_experts = parts.expert_fields(raw, "noaux_tc", "sigmoid", norm_topk_prob=True)
    return parts.grouped_query_fields(raw) | of_heads | of_experts


def problems(raw: Raw) -> list[str]:
    found = [] if parts.partial_rotary_factor(raw) else ["partial_rotary_factor is missing"]
    found += parts.expert_problems(raw, "first_k_dense_replace", "routed_scaling_factor")
    return found + parts.grouped_query_problems(raw)


FAMILY = Family("glm4_moe", "Glm4MoeForCausalLM", parts.GROUPED_QUERY_SIZES + parts.EXPERT_SIZES, fields, problems)
