"""DeepSeek-V3 and what is built like it (R1, V3.1, Moonlight), and DeepSeek-V2: latent attention, first layers dense,
then mixtures of experts.
"""

from __future__ import annotations

from hf_formats.families import family as parts
from hf_formats.families.family import Family, Fields, Raw

SIZES = parts.LATENT_SIZES + parts.EXPERT_SIZES


def v3_fields(raw: Raw) -> Fields:
    """Sigmoid scores, with a bias that steers the choice."""
    return parts.latent_fields(raw) | parts.expert_fields(raw, "noaux_tc", "sigmoid", norm_topk_prob=True)


def v3_problems(raw: Raw) -> list[str]:
    return _problems(raw, "first_k_dense_replace", "routed_scaling_factor")


def v2_fields(raw: Raw) -> Fields:
    """Softmax scores; a group counts as its best expert."""
    return parts.latent_fields(raw) | parts.expert_fields(raw, "greedy", "softmax", norm_topk_prob=False)


def v2_problems(raw: Raw) -> list[str]:
    return _problems(raw, "first_k_dense_replace")


def _problems(raw: Raw, *required: str) -> list[str]:
    found = parts.refused(raw, attention_bias=False) + parts.expert_problems(raw, *required)
    return found + parts.latent_problems(raw)


V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", SIZES, v3_fields, v3_problems)
V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", SIZES, v2_fields, v2_problems)
