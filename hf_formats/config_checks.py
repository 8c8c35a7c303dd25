"""Every problem of a config.json, found before a model is made from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_formats.rope import rope_problems, rope_scaling

SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")

DECODER_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
EXPERT_SIZES = ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
GROUPED_QUERY_SIZES = ("num_key_value_heads",)


def config_problems(raw: Mapping[str, Any], model_type: str) -> list[str]:
    """Return one sentence per problem of a config.json of a supported model type."""
    is_qwen = model_type == "qwen3"
    found = _size_problems(raw, DECODER_SIZES + (GROUPED_QUERY_SIZES if is_qwen else LATENT_SIZES + EXPERT_SIZES))
    if raw.get("attention_bias"):
        found.append("attention_bias is true; only bias-free attention is supported")
    if raw.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act is {raw.get('hidden_act')!r}; only silu is supported")
    if dtype_name(raw) not in SUPPORTED_DTYPES:
        found.append(f"torch_dtype is {dtype_name(raw)!r}; one of {', '.join(SUPPORTED_DTYPES)} is needed")
    return found + (_qwen_problems(raw) if is_qwen else _deepseek_problems(raw, is_v3=model_type == "deepseek_v3"))


def dtype_name(raw: Mapping[str, Any]) -> str:
    """Return torch's name of the weights' dtype; float32, as in transformers, when config.json does not give it."""
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")


def _size_problems(raw: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    found = []
    for key in keys:
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            found.append(f"{key} is {value!r}; a positive integer is needed" if key in raw else f"{key} is missing")
    return found


def _qwen_problems(raw: Mapping[str, Any]) -> list[str]:
    keys = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    if not all(_is_int(raw.get(key)) and raw[key] > 0 for key in keys):
        return []  # reported with the sizes
    found = []
    heads, groups, hidden = (int(raw[key]) for key in keys)
    if heads % groups:
        found.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    size = raw.get("head_dim")
    if size is None and hidden % (2 * heads):
        found.append(f"head_dim is missing, and hidden_size {hidden} does not give {heads} heads of an even size")
    if size is not None and (not _is_int(size) or size <= 0 or size % 2):
        found.append(f"head_dim is {size!r}; a positive even integer or null is needed")
    if raw.get("use_sliding_window"):
        found.append("use_sliding_window is true; only attention over the whole sequence is supported")
    scaling = rope_scaling(raw)
    if scaling is not None:
        found.append(f"rope_scaling is {scaling}; only plain rotary positions (null) are supported for qwen3")
    return found


def _deepseek_problems(raw: Mapping[str, Any], is_v3: bool) -> list[str]:
    found = []
    required = ("first_k_dense_replace", *(("routed_scaling_factor",) if is_v3 else ()))
    found += [f"{key} is missing" for key in required if raw.get(key) is None]
    for key in ("q_lora_rank", "n_shared_experts", "n_group", "topk_group", "num_nextn_predict_layers"):
        value = raw.get(key)
        if value is not None and (not _is_int(value) or value < 0):
            found.append(f"{key} is {value!r}; an integer or null is needed")
    for key, lowest in (("first_k_dense_replace", 0), ("moe_layer_freq", 1)):
        value = lowest if raw.get(key) is None else raw[key]
        if not isinstance(value, int) or value < lowest:
            found.append(f"{key} is {value!r}; an integer of at least {lowest} is needed")
    if raw.get("tie_word_embeddings"):
        found.append("tie_word_embeddings is true; only models with a separate lm_head are supported")
    if raw.get("scoring_func") not in (None, "sigmoid", "softmax"):
        found.append(f"scoring_func is {raw.get('scoring_func')!r}; sigmoid or softmax is needed")
    if raw.get("rope_interleave", True) is not True:
        found.append(f"rope_interleave is {raw['rope_interleave']!r}; only neighbours are rotated (true)")
    return found + _router_problems(raw) + rope_problems(raw)


def _router_problems(raw: Mapping[str, Any]) -> list[str]:
    keys = ("n_routed_experts", "n_group", "num_experts_per_tok", "topk_group")
    values = [raw.get(key) or (1 if "group" in key else None) for key in keys]
    if not all(_is_int(value) for value in values):
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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
