"""Forms of a batch outside the process: bytes for pickling, plain types for files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_rows(values: Sequence | np.ndarray) -> np.ndarray:
    """A 1-D object array with one element per row; an array stays as it is."""
    if isinstance(values, np.ndarray):
        return values
    rows = np.empty(len(values), dtype=object)  # np.array would make a matrix of rows of equal length
    for i, value in enumerate(values):
        rows[i] = value
    return rows


def pack_tensor(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], np.ndarray]:
    """(dtype, shape, raw bytes) of a tensor, on the CPU and without the rest of a storage it is a view of."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy()


def unpack_tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: np.ndarray) -> Tensor:
    """The inverse of ``pack_tensor``; the tensor owns its memory."""
    # Ray hands out read-only memory of its store: a tensor over it would crash on the first in-place op.
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)


def to_plain(value: Any, key: str) -> Any:
    """``value`` in types ``torch.load(weights_only=True)`` accepts; ValueError names ``key`` when there are none."""
    if isinstance(value, np.generic):  # before float: np.float64 is one
        return value.item()
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    if isinstance(value, np.ndarray):
        rows = [to_plain(row, key) for row in value.flat]
        return {"__ndarray__": rows, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        return type(value)(to_plain(element, key) for element in value)
    if isinstance(value, dict):
        return {name: to_plain(element, key) for name, element in value.items()}
    raise ValueError(f"{key!r} holds a {type(value).__name__}, which cannot be written to disk; drop it first")


def from_plain(value: Any) -> Any:
    """The inverse of ``to_plain``."""
    if isinstance(value, dict) and "__ndarray__" in value:
        rows = as_rows([from_plain(row) for row in value["__ndarray__"]])
        return rows.astype(np.dtype(value["dtype"])).reshape(value["shape"])
    if isinstance(value, list | tuple):
        return type(value)(from_plain(element) for element in value)
    if isinstance(value, dict):
        return {name: from_plain(element) for name, element in value.items()}
    return value
