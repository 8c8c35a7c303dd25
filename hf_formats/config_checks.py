"""Every problem of a config.json, found before a model is made from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_formats.families.family import Family, is_int

SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")

DECODER_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def config_problems(raw: Mapping[str, Any], family: Family) -> list[str]:
    """Return one sentence per problem of a config.json of this family."""
    found = []
    for key in DECODER_SIZES + family.sizes:
        value = raw.get(key)
        if value is None or not is_int(value) or value <= 0:
            found.append(f"{key} is {value!r}; a positive integer is needed" if key in raw else f"{key} is missing")
    if raw.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act is {raw.get('hidden_act')!r}; only silu is supported")
    if dtype_name(raw) not in SUPPORTED_DTYPES:
        found.append(f"torch_dtype is {dtype_name(raw)!r}; one of {', '.join(SUPPORTED_DTYPES)} is needed")
    return found + family.problems(raw)


def dtype_name(raw: Mapping[str, Any]) -> str:
    """Return torch's name of the weights' dtype; float32, as in transformers, when config.json does not give it."""
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
