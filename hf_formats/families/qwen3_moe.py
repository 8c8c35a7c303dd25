"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3's attention, then experts chosen by softmax, none of them shared."""

from __future__ import annotations

from hf_formats.families import family as parts
from hf_formats.families import qwen3
from hf_formats.families.family import Family, Fields, Raw


def fields(raw: Raw) -> Fields:
    return qwen3.fields(raw) | parts.expert_fields(parts.common_keys(raw), "greedy", "softmax", norm_topk_prob=False)


def problems(raw: Raw) -> list[str]:
    every_layer = parts.refused(raw, decoder_sparse_step=1, mlp_only_layers=[])
    return qwen3.problems(raw) + every_layer + parts.expert_problems(parts.common_keys(raw), "n_routed_experts")


SIZES = (*parts.GROUPED_QUERY_SIZES, "moe_intermediate_size", "num_experts_per_tok")
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", SIZES, fields, problems)
