"""In which form weights are held: asked for by the caller, else as the checkpoint stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FP8, DEQUANTIZE = "fp8", "dequantize"
QUANTIZATIONS = (FP8, DEQUANTIZE)
_SUPPORTED: dict[str, Any] = {"quant_method": FP8, "fmt": "e4m3", "weight_block_size": [128, 128]}


def resolve_quantization(model_dir: str, requested: str | None) -> tuple[list[str], str | None]:
    """(problems, "fp8" when weights are held in FP8 blocks or None when in the model's dtype).

    requested: "fp8" quantises what comes in another form, "dequantize" multiplies FP8 out as it comes, None keeps the
    form of the checkpoint.
    """
    config = json.loads((Path(model_dir) / "config.json").read_text()).get("quantization_config")
    problems = [
        f"quantization_config.{key}={config.get(key)!r} in {model_dir}/config.json is not supported, expected {value!r}"
        for key, value in _SUPPORTED.items()
        if config and config.get(key, value if key == "fmt" else None) != value
    ]
    if requested is not None and requested not in QUANTIZATIONS:
        problems.append(
            f"quantization={requested!r} is unknown, expected one of {', '.join(QUANTIZATIONS)}, or leave it out to "
            "hold weights as the checkpoint stores them"
        )
    return problems, FP8 if requested == FP8 or (requested is None and config) else None
