"""Columns of a batch: merged with those of another one, as bytes for pickling, and as plain types for files."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor


class BatchError(ValueError, AssertionError):
    """A batch that does not fit: a ValueError here, and the AssertionError that upstream's callers may expect."""


def list_of_dict_to_dict_of_list(list_of_dict: list[dict]) -> dict[Any, list]:
    """One list per key; BatchError when the keys of the dicts differ. No dict gives no key."""
    keys = list(list_of_dict[0]) if list_of_dict else []
    for number, entry in enumerate(list_of_dict):
        if entry.keys() != set(keys):
            raise BatchError(f"entry {number} has keys {sorted(entry)}, the first one {sorted(keys)}")
    return {key: [entry[key] for entry in list_of_dict] for key in keys}


def as_rows(values: Sequence | np.ndarray) -> np.ndarray:
    """A 1-D object array with one element per row; an array stays as it is."""
    if isinstance(values, np.ndarray):
        return values
    rows = np.empty(len(values), dtype=object)  # np.array would make a matrix of rows of equal length
    for i, value in enumerate(values):
        rows[i] = value
    return rows


def tensors_of(batch: TensorDict | None) -> dict[str, Tensor]:
    """The columns of a TensorDict by name; none for None."""
    return {} if batch is None else {str(key): batch.get(key) for key in batch.keys()}  # noqa: SIM118


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    if tensor_dict2 is None:
        return tensor_dict1
    if tensor_dict1 is None:
        return tensor_dict2.copy()  # columns that are added to the result must not appear in ``tensor_dict2``
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = tuple(tensor_dict1.batch_size), tuple(tensor_dict2.batch_size)
        raise BatchError(f"union of batches of size {sizes[0]} and {sizes[1]}")
    columns = union_dict(tensors_of(tensor_dict1), tensors_of(tensor_dict2), "batch")
    return TensorDict(columns, batch_size=tensor_dict1.batch_size)


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return union_dict(tensor_dict1, tensor_dict2, "non_tensor_batch")


def union_dict(left: dict[str, Any], right: dict[str, Any], name: str) -> dict[str, Any]:
    """The entries of both; ValueError when a key has two different values. ``name`` is for the message."""
    conflicts = [key for key in right if key in left and not _equal(left[key], right[key])]
    if conflicts:
        raise BatchError(f"union: {name} has different values for {conflicts}; pop or rename them first")
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
    if isinstance(value, dict) and "__ndarray__" in value:
        rows = as_rows([from_plain(row) for row in value["__ndarray__"]])
        return rows.astype(np.dtype(value["dtype"])).reshape(value["shape"])
    if isinstance(value, list | tuple):
        return type(value)(from_plain(element) for element in value)
    if isinstance(value, dict):
        return {name: from_plain(element) for name, element in value.items()}
    return value


def write_content(
    tensors: dict[str, Tensor], arrays: dict[str, np.ndarray], settings: dict[str, Any], filepath: str
) -> None:
    """Writes a batch atomically, in a form that ``torch.load(weights_only=True)`` reads."""
    content = {
        "batch": {key: tensor.clone() for key, tensor in tensors.items()},
        "non_tensor_batch": {key: to_plain(array, key) for key, array in arrays.items()},
        "meta_info": {key: to_plain(value, key) for key, value in settings.items()},
    }
    temporary = f"{filepath}.tmp{os.getpid()}"
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, filepath)


def read_content(filepath: str) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """The inverse of ``write_content``: tensors on the CPU, arrays and settings."""
    content = torch.load(filepath, map_location="cpu", weights_only=True)
    arrays = {key: from_plain(value) for key, value in content["non_tensor_batch"].items()}
    return content["batch"], arrays, {key: from_plain(value) for key, value in content["meta_info"].items()}


def describe(tensors: dict[str, Tensor], arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> str:
    """A line per column: its shape, dtype and device, or the type of a setting."""
    lines = ["batch"] if tensors else []
    lines += [f"  {key}: {tuple(tensor.shape)} ({tensor.dtype}) {tensor.device}" for key, tensor in tensors.items()]
    lines += ["non_tensor_batch"] if arrays else []
    lines += [f"  {key}: ndarray{array.shape} ({array.dtype})" for key, array in arrays.items()]
    lines += ["meta_info"] if settings else []
    lines += [f"  {key}: {type(value).__name__}" for key, value in settings.items()]
    return "\n".join(lines)
