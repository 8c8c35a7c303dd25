"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3's attention, then experts chosen by softmax, none of them shared."""

from __future__ import annotations

from hf_formats.families import qwen3
from hf_formats.families.family import GROUPED_QUERY_SIZES, Family, Fields, Raw, expert_fields, expert_problems, refused


def fields(raw: Raw) -> Fields:
    return qwen3.fields(raw) | expert_fields(_deepseeks_keys(raw), "greedy", "softmax", norm_topk_prob=False)


def problems(raw: Raw) -> list[str]:
    every_layer = refused(raw, decoder_sparse_step=1, mlp_only_layers=[])
    return qwen3.problems(raw) + every_layer + expert_problems(_deepseeks_keys(raw), "n_routed_experts")


def _deepseeks_keys(raw: Raw) -> Fields:
    """``num_experts``, which transformers 5 writes as ``num_local_experts``, under the name of other families."""
    names = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
    names["router_aux_loss_coef"] = "aux_loss_alpha"
    return {names.get(key, key): value for key, value in raw.items()}


SIZES = (*GROUPED_QUERY_SIZES, "moe_intermediate_size", "num_experts_per_tok")
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", SIZES, fields, problems)
