"""Names of precisions as torch's dtypes (upstream: ``verl.utils.torch_dtypes``)."""

from __future__ import annotations

import torch

HALF_LIST = [16, "16", "fp16", "float16", torch.float16]
FLOAT_LIST = [32, "32", "fp32", "float32", torch.float32]
BFLOAT_LIST = ["bf16", "bfloat16", torch.bfloat16]

Precision = str | int | torch.dtype


class PrecisionType:
    """The names of precisions and what they stand for."""

    HALF = "16"
    FLOAT = "32"
    FULL = "64"
    BFLOAT = "bf16"
    MIXED = "mixed"

    @staticmethod
    def supported_type(precision: str | int) -> bool:
        """Whether ``precision`` is one of ``supported_types``, as a number or a text."""
        return str(precision) in PrecisionType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        return [
            PrecisionType.HALF,
            PrecisionType.FLOAT,
            PrecisionType.FULL,
            PrecisionType.BFLOAT,
            PrecisionType.MIXED,
        ]

    @staticmethod
    def is_fp16(precision: Precision) -> bool:
        return precision in HALF_LIST

    @staticmethod
    def is_fp32(precision: Precision) -> bool:
        return precision in FLOAT_LIST

    @staticmethod
    def is_bf16(precision: Precision) -> bool:
        return precision in BFLOAT_LIST

    @staticmethod
    def to_dtype(precision: Precision) -> torch.dtype:
        """The dtype of any of the lists' names; RuntimeError for another one."""
        for names, dtype in ((HALF_LIST, torch.float16), (FLOAT_LIST, torch.float32), (BFLOAT_LIST, torch.bfloat16)):
            if precision in names:
                return dtype
        raise RuntimeError(f"precision {precision!r} is not known; expected one of fp16, fp32 and bf16 in any form")

    @staticmethod
    def to_str(precision: torch.dtype) -> str:
        """``fp16``, ``fp32`` or ``bf16``; RuntimeError for another dtype."""
        names = {torch.float16: "fp16", torch.float32: "fp32", torch.bfloat16: "bf16"}
        if precision not in names:
            raise RuntimeError(f"dtype {precision} has no name here; expected float16, float32 or bfloat16")
        return names[precision]
