"""The form in which weights are held: what the caller asks for, else what the checkpoint stores."""

from __future__ import annotations

from hf_formats.config import read_config_dict
from hf_formats.fp8 import quantization_problems

FP8, DEQUANTIZE = "fp8", "dequantize"
QUANTIZATIONS = (FP8, DEQUANTIZE)


def resolve_quantization(model_dir: str, requested: str | None) -> tuple[list[str], str | None]:
    """Return (problems, "fp8" when weights are held in FP8 blocks or None when in the model's dtype).

    requested: "fp8" quantises weights that arrive in another form, "dequantize" converts FP8 weights as they arrive,
    None keeps the checkpoint's form.
    """
    config = read_config_dict(model_dir)
    problems = quantization_problems(config)
    if requested is not None and requested not in QUANTIZATIONS:
        problems.append(
            f"quantization={requested!r} is unknown, expected one of {', '.join(QUANTIZATIONS)}, or leave it out to "
            "hold weights as the checkpoint stores them"
        )
    is_fp8 = requested == FP8 or (requested is None and bool(config.get("quantization_config")))
    return problems, FP8 if is_fp8 else None
