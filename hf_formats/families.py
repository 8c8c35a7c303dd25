"""The model families that both engines know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type of config.json -> architecture"""


def model_family(raw: Mapping[str, Any], source: str = "config") -> str:
    """Return the model_type of a config.json, which may give its architecture only.

    ValueError naming the families that exist when it is none of them.
    """
    architecture = (raw.get("architectures") or [None])[0]
    model_type = raw.get("model_type") or next((name for name in FAMILIES if FAMILIES[name] == architecture), None)
    if model_type not in FAMILIES:
        what = f"model_type {model_type!r}" if model_type else f"architecture {architecture!r} without a model_type"
        raise ValueError(f"{source}: {what} is not supported; supported: {', '.join(FAMILIES)}")
    if architecture not in (None, FAMILIES[model_type]):
        raise ValueError(
            f"{source}: architecture {architecture!r} is not supported; model_type {model_type!r} is supported as "
            f"{FAMILIES[model_type]}"
        )
    return str(model_type)
