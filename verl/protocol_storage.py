"""Columns of a batch: merged with those of another one, and as bytes for pickling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils.errors import BatchError

# What workers report about a call, as opposed to what the batch is: parts may differ in it.
_TIMING = "timing"  # seconds by name; the first part's count
BY_RANK = "by_rank"  # rank -> figure -> value; those of all parts are merged


AUTO_PADDING = "_verl_auto_padding"  # meta_info: calls that split the batch pad it (upstream's key)


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


def united_tensors(left: TensorDict | None, right: TensorDict | None) -> TensorDict | None:
    """A TensorDict with the columns of both."""
    if right is None:
        return left
    if left is None:
        return right.copy()  # columns that are added to the result must not appear in ``right``
    if left.batch_size != right.batch_size:
        raise BatchError(f"union of batches of size {tuple(left.batch_size)} and {tuple(right.batch_size)}")
    columns = union_dict(tensors_of(left), tensors_of(right), "batch")
    return TensorDict(columns, batch_size=left.batch_size)


def merged_settings(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings of a batch whose parts have these; a key with different values is an error.

    ``metrics``, a dict or a list of dicts in each part, become one dict of lists.
    """
    reports = [report for part in parts for report in _reports(part.get("metrics")) if report]
    merged: dict[str, Any] = {"metrics": list_of_dict_to_dict_of_list(reports)} if reports else {}
    for part in parts:
        for key, value in part.items():
            if key == "metrics":
                continue
            if key == BY_RANK:
                merged[key] = {**merged.get(key, {}), **value}
            elif key == _TIMING:
                merged[key] = merged.get(key) or value
            elif key in merged and not _equal(merged[key], value):
                raise BatchError(f"concat: parts differ in meta_info[{key!r}]: {merged[key]!r:.80} and {value!r:.80}")
            else:
                merged[key] = value
    return merged


def _reports(metrics: Any) -> list[dict]:
    return [] if metrics is None else list(metrics) if isinstance(metrics, list) else [metrics]


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


def unpack_tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: Any) -> Tensor:
    """The inverse of ``pack_tensor``; the tensor owns its memory."""
    # Ray hands out read-only memory of its store: a tensor over it would crash on the first in-place op.
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)


def as_json(value: Any) -> Any:
    """A field as another process gets it: arrays as lists, names as text, dates and the like as text."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): as_json(of) for name, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
