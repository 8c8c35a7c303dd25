"""What of a config.json this engine's models cannot do, every problem of it, before anything is made of it."""

from __future__ import annotations

from typing import Any

SUPPORTED_MODEL_TYPES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Qwen3ForCausalLM": "qwen3",
}
TOPK_METHODS = {"sigmoid": ("noaux_tc",), "softmax": ("greedy", "group_limited_greedy")}


def config_problems(raw: dict[str, Any]) -> list[str]:
    """One sentence per value that is not supported; missing keys are the reader's to name."""
    problems = []
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in SUPPORTED_MODEL_TYPES:
        problems.append(f"architectures[0]={architecture} is unknown; known: {', '.join(SUPPORTED_MODEL_TYPES)}")
    problems += _unexpected(raw, {"hidden_act": "silu", "attention_bias": False})
    rope_type = rope_parameters(raw).get("rope_type", "default")
    if SUPPORTED_MODEL_TYPES.get(architecture) == "qwen3":
        problems += _unexpected(raw, {"use_sliding_window": False})
        problems += _qwen_problems(raw)
        known_ropes: tuple[str, ...] = ("default",)
    else:
        problems += _unexpected(raw, {"tie_word_embeddings": False, "rope_interleave": True, "moe_layer_freq": 1})
        problems += _routing_problems(raw, is_v2=SUPPORTED_MODEL_TYPES.get(architecture) == "deepseek_v2")
        known_ropes = ("default", "yarn")
    if rope_type not in known_ropes:
        problems.append(f"rope type {rope_type!r} is not supported, expected {' or '.join(known_ropes)}")
    return problems


def rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """Rope settings under the names of transformers 5 (`rope_parameters`), from either generation of config.json."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    return parameters


def _unexpected(raw: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        f"{key}={raw[key]!r} is not supported, expected {value!r}"
        for key, value in expected.items()
        if raw.get(key, value) != value
    ]


def _qwen_problems(raw: dict[str, Any]) -> list[str]:
    heads, kv_heads, size = (raw.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    problems = []
    if heads and kv_heads and heads % kv_heads:
        problems.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if size is not None and size % 2:
        problems.append(f"head_dim={size} is odd: rotary positions turn pairs of channels")
    return problems


def _routing_problems(raw: dict[str, Any], is_v2: bool) -> list[str]:
    scoring = raw.get("scoring_func") or ("softmax" if is_v2 else "sigmoid")
    method = raw.get("topk_method") or ("greedy" if is_v2 else "noaux_tc")
    problems = []
    if method not in TOPK_METHODS.get(scoring, ()):
        known = " or ".join(f"{name} with {'/'.join(methods)}" for name, methods in TOPK_METHODS.items())
        problems.append(f"scoring_func={scoring!r} with topk_method={method!r} is not supported, expected {known}")
    experts, groups = raw.get("n_routed_experts"), raw.get("n_group") or 1
    if experts and experts % groups:
        problems.append(f"n_routed_experts={experts} does not divide by n_group={groups}")
    return problems
