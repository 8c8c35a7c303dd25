"""The model families that both engines know: a file for each, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_formats.families import deepseek, glm4_moe, kimi_k2, llama, qwen2, qwen3, qwen3_moe
from hf_formats.families.family import Family

FAMILIES = {
    family.model_type: family
    for family in (
        deepseek.V3,
        deepseek.V2,
        qwen3.FAMILY,
        qwen2.FAMILY,
        llama.FAMILY,
        qwen3_moe.FAMILY,
        glm4_moe.FAMILY,
        kimi_k2.FAMILY,
    )
}
"""model_type of config.json -> its description"""


def model_family(raw: Mapping[str, Any], source: str = "config") -> Family:
    """Return the family of a config.json, which may give its architecture only.

    ValueError naming the families that exist when it is none of them.
    """
    architecture = (raw.get("architectures") or [None])[0]
    by_architecture = (name for name, family in FAMILIES.items() if family.architecture == architecture)
    model_type = raw.get("model_type") or next(by_architecture, None)
    if model_type not in FAMILIES:
        what = f"model_type {model_type!r}" if model_type else f"architecture {architecture!r} without a model_type"
        raise ValueError(f"{source}: {what} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    if architecture not in (None, family.architecture):
        raise ValueError(
            f"{source}: architecture {architecture!r} is not supported; model_type {model_type!r} is supported as "
            f"{family.architecture}"
        )
    return family
