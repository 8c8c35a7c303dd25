"""What a model family is, and the parts that its description is made of: attention, experts, positions.

A description says which keys of config.json a ``model_type`` has, what they mean (fields of ``HFModelConfig``) and
which of their values nobody can honour. Both engines, the weight plan, conversion, weight sync, export and the planner
read the fields and know no family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_formats.rope import rope_problems

Raw = Mapping[str, Any]
Fields = dict[str, Any]

EXPERT_SIZES = ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
GROUPED_QUERY_SIZES = ("num_key_value_heads",)
# Other names of keys: transformers 5 writes num_experts as num_local_experts.
_COMMON_NAMES = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "router_aux_loss_coef": "aux_loss_alpha",
}
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    architecture: its class in transformers, which config.json may give instead. sizes: keys that must be positive
    integers, beside those of every decoder. fields: from a config.json without problems to fields of ``HFModelConfig``;
    keys that are null are left out. problems: one sentence for each value that is wrong or not supported.
    """

    model_type: str
    architecture: str
    sizes: tuple[str, ...]
    fields: Callable[[Raw], Fields]
    problems: Callable[[Raw], list[str]]


def common_keys(raw: Raw) -> Fields:
    """A config.json with the number of experts and their loss under the names that most families give them."""
    return {_COMMON_NAMES.get(key, key): value for key, value in raw.items()}


def grouped_query_fields(raw: Raw) -> Fields:
    """Attention in groups of query heads, without norms or biases; ``partial_rotary_factor`` turns a part of a head."""
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return {
        "num_key_value_heads": raw["num_key_value_heads"],
        "head_dim": head_dim,
        "rope_dim": int(head_dim * (partial_rotary_factor(raw) or 1.0)),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def partial_rotary_factor(raw: Raw) -> float | None:
    """The share of a head's channels that positions turn, None where config.json does not give it.

    transformers 5 writes it among the ``rope_parameters``.
    """
    return raw.get("partial_rotary_factor") or (raw.get("rope_parameters") or {}).get("partial_rotary_factor")


def grouped_query_problems(raw: Raw) -> list[str]:
    """What is wrong with heads, windows and positions of attention in groups."""
    found = rope_problems(raw, ("yarn", "llama3"))
    if raw.get("use_sliding_window"):
        found.append("use_sliding_window is true; only attention over the whole sequence is supported")
    keys = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    if not all(is_int(raw.get(key)) and raw[key] > 0 for key in keys):
        return found  # reported with the sizes
    heads, groups, hidden = (int(raw[key]) for key in keys)
    if heads % groups:
        found.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    size = raw.get("head_dim")
    if size is None and hidden % (2 * heads):
        found.append(f"head_dim is missing, and hidden_size {hidden} does not give {heads} heads of an even size")
    if size is not None and (not is_int(size) or size <= 0 or size % 2):
        found.append(f"head_dim is {size!r}; a positive even integer or null is needed")
    elif not found and (turned := grouped_query_fields(raw)["rope_dim"]) % 2:
        found.append(f"partial_rotary_factor turns {turned} channels of a head; an even number is needed")
    return found


def latent_fields(raw: Raw) -> Fields:
    """Multi-head latent attention (arXiv 2405.04434)."""
    return {
        **{key: raw[key] for key in LATENT_SIZES},
        "q_lora_rank": raw.get("q_lora_rank") or None,
        "num_key_value_heads": raw["num_attention_heads"],
        "rope_dim": raw["qk_rope_head_dim"],
    }


def latent_problems(raw: Raw) -> list[str]:
    """What is wrong with positions and head of a model with latent attention."""
    found = []
    if raw.get("tie_word_embeddings"):
        found.append("tie_word_embeddings is true; only models with a separate lm_head are supported")
    if raw.get("rope_interleave", True) is not True:
        found.append(f"rope_interleave is {raw['rope_interleave']!r}; only neighbours are rotated (true)")
    return found + integer_problems(raw, "q_lora_rank") + rope_problems(raw, ("yarn",))


def expert_fields(raw: Raw, topk_method: str, scoring_func: str, norm_topk_prob: bool) -> Fields:
    """Routed and shared experts under DeepSeek's keys; the arguments are what the family has when a key is missing.

    ``topk_method``: "noaux_tc" (arXiv 2412.19437), "group_limited_greedy" or "greedy", which is among all experts,
    whatever the groups.
    """
    method = raw.get("topk_method") or topk_method
    has_groups = method != "greedy"
    return {
        **{key: raw[key] for key in EXPERT_SIZES},
        "n_shared_experts": raw.get("n_shared_experts") or 0,
        "first_k_dense_replace": raw.get("first_k_dense_replace", 0),
        "moe_layer_freq": raw.get("moe_layer_freq", 1),
        "n_group": (has_groups and raw.get("n_group")) or 1,
        "topk_group": (has_groups and raw.get("topk_group")) or 1,
        "topk_method": method,
        "scoring_func": raw.get("scoring_func") or scoring_func,
        "norm_topk_prob": bool(raw.get("norm_topk_prob", norm_topk_prob)),
        "routed_scaling_factor": float(raw.get("routed_scaling_factor", 1.0)),
        "aux_loss_alpha": float(raw.get("aux_loss_alpha") or 0.0),
        "num_nextn_predict_layers": raw.get("num_nextn_predict_layers") or 0,
    }


def expert_problems(raw: Raw, *required: str) -> list[str]:
    """What is wrong with the experts of a config.json under DeepSeek's keys; ``required`` must be there."""
    found = [f"{key} is missing" for key in required if raw.get(key) is None]
    found += integer_problems(raw, "n_shared_experts", "n_group", "topk_group", "num_nextn_predict_layers")
    for key, lowest in (("first_k_dense_replace", 0), ("moe_layer_freq", 1)):
        value = lowest if raw.get(key) is None else raw[key]
        if not is_int(value) or value < lowest:
            found.append(f"{key} is {value!r}; an integer of at least {lowest} is needed")
    if raw.get("scoring_func") not in (None, "sigmoid", "softmax"):
        found.append(f"scoring_func is {raw.get('scoring_func')!r}; sigmoid or softmax is needed")
    return found + _group_problems(raw)


def refused(raw: Raw, **only: Any) -> list[str]:
    """One sentence for each key whose value is neither missing nor null nor the one that is supported."""
    return [
        f"{key} is {raw[key]!r}; only {value!r} is supported"
        for key, value in only.items()
        if raw.get(key) is not None and raw[key] != value
    ]


def integer_problems(raw: Raw, *keys: str) -> list[str]:
    """One sentence for each key that is neither missing nor null nor an integer of at least 0."""
    return [
        f"{key} is {raw[key]!r}; an integer or null is needed"
        for key in keys
        if raw.get(key) is not None and (not is_int(raw[key]) or raw[key] < 0)
    ]


def is_int(value: object) -> bool:
    """Whether a value of a JSON file is an integer, which ``true`` is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _group_problems(raw: Raw) -> list[str]:
    keys = ("n_routed_experts", "n_group", "num_experts_per_tok", "topk_group")
    values = [raw.get(key) or (1 if "group" in key else None) for key in keys]
    if not all(map(is_int, values)):
        return []  # reported with the sizes
    experts, groups, topk, topk_group = (int(value or 0) for value in values)
    if experts % groups:
        return [f"n_routed_experts {experts} does not divide into n_group {groups}"]
    found = []
    if groups > 1 and experts // groups < 2:
        found.append(f"n_group {groups} leaves one expert a group; groups are ranked by their two best experts")
    if topk_group > groups:
        found.append(f"topk_group {topk_group} is larger than n_group {groups}")
    elif topk > experts // groups * topk_group:
        found.append(
            f"num_experts_per_tok {topk} exceeds the {experts // groups * topk_group} experts of {topk_group} groups"
        )
    return found
