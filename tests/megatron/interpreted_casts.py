"""Triton's interpreter with a GPU's casts to and from e4m3; its own cut where a GPU rounds, and have no NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@contextmanager
def casts_of_a_gpu() -> Iterator[None]:
    """Round to the nearest, to the largest e4m3 value what is larger (PTX: ``cvt.rn.satfinite``); NaN stays NaN."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if "fp8e4nv" not in (source.name, target.name):
            return convert(values, source, target, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(values)).view(_DTYPES[source.name]).float()
        if target.name == "fp8e4nv":
            wide = wide.clamp(-448, 448)
        return wide.to(_DTYPES[target.name]).view(getattr(torch, f"uint{8 * _DTYPES[target.name].itemsize}")).numpy()

    interpreter._convert_float = converted
    try:
        yield
    finally:
        interpreter._convert_float = convert
