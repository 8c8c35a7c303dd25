"""DeepSeek-V3 and what is built like it (R1, V3.1, Moonlight), and DeepSeek-V2: latent attention, first layers dense,
then mixtures of experts.
"""

from __future__ import annotations

from hf_formats.families.family import (
    EXPERT_SIZES,
    LATENT_SIZES,
    Family,
    Fields,
    Raw,
    expert_fields,
    expert_problems,
    latent_fields,
    latent_problems,
    refused,
)

SIZES = LATENT_SIZES + EXPERT_SIZES


def v3_fields(raw: Raw) -> Fields:
    """Sigmoid scores, with a bias that steers the choice."""
    return latent_fields(raw) | expert_fields(raw, "noaux_tc", "sigmoid", norm_topk_prob=True)


def v3_problems(raw: Raw) -> list[str]:
    required = ("first_k_dense_replace", "routed_scaling_factor")
    return refused(raw, attention_bias=False) + expert_problems(raw, *required) + latent_problems(raw)


def v2_fields(raw: Raw) -> Fields:
    """Softmax scores; a group counts as its best expert."""
    return latent_fields(raw) | expert_fields(raw, "greedy", "softmax", norm_topk_prob=False)


def v2_problems(raw: Raw) -> list[str]:
    return refused(raw, attention_bias=False) + expert_problems(raw, "first_k_dense_replace") + latent_problems(raw)


V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", SIZES, v3_fields, v3_problems)
V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", SIZES, v2_fields, v2_problems)
