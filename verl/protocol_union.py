"""How the columns of two batches are merged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor


def tensors_of(batch: TensorDict | None) -> dict[str, Tensor]:
    """The columns of a TensorDict by name; none for None."""
    return {} if batch is None else {str(key): batch.get(key) for key in batch.keys()}  # noqa: SIM118


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """Columns of both; ValueError when a key has two different tensors."""
    if tensor_dict2 is None:
        return tensor_dict1
    if tensor_dict1 is None:
        return tensor_dict2.copy()  # columns that are added to the result must not appear in ``tensor_dict2``
    columns = union_dict(tensors_of(tensor_dict1), tensors_of(tensor_dict2), "batch")
    return TensorDict(columns, batch_size=tensor_dict1.batch_size)


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of both; ValueError when a key has two different arrays."""
    return union_dict(tensor_dict1, tensor_dict2, "non_tensor_batch")


def union_dict(left: dict[str, Any], right: dict[str, Any], name: str) -> dict[str, Any]:
    """The entries of both; ValueError when a key has two different values. ``name`` is for the message."""
    conflicts = [key for key in right if key in left and not _equal(left[key], right[key])]
    if conflicts:
        raise ValueError(f"union: {name} has different values for {conflicts}; pop or rename them first")
    return {**left, **right}


def _equal(left: Any, right: Any) -> bool:
    """Deep equality in which NaN equals itself."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same_form = left.shape == right.shape and left.dtype == right.dtype and left.device == right.device
        return same_form and bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        same_form = left.shape == right.shape and left.dtype == right.dtype
        return same_form and all(_equal(a, b) for a, b in zip(left.flat, right.flat, strict=True))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float | np.floating) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)
