"""TensorDicts that hold objects beside tensors (upstream: ``verl.utils.tensordict_utils``).

A value of the whole batch is ``NonTensorData``, one object per row is ``NonTensorStack`` (tensordict's own types).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from verl.protocol_storage import union_dict
from verl.utils.errors import BatchError


def assign_non_tensor_dict(tensor_dict: TensorDict, non_tensor_dict: dict[str, Any]) -> TensorDict:
    """Adds values of the whole batch, in place."""
    for key, value in non_tensor_dict.items():
        assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Adds one value of the whole batch."""
    tensor_dict[key] = NonTensorData(val)


def assign_non_tensor(tensordict: TensorDict, **kwargs: Any) -> TensorDict:
    """``assign_non_tensor_dict`` with the values as keywords."""
    return assign_non_tensor_dict(tensordict, kwargs)


def unwrap_non_tensor_data(data: Any) -> Any:
    """The value that ``NonTensorData`` wraps; anything else as it is."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """The value under ``key``, unwrapped; ``default`` when there is none."""
    return unwrap_non_tensor_data(data.get(key, default))


def get_tensordict(tensor_dict: dict[str, Tensor | list], non_tensor_dict: dict[str, Any] | None = None) -> TensorDict:
    """Tensors and lists (one object per row) of B rows, with the values of the whole batch beside them."""
    lengths = {key: len(column) for key, column in tensor_dict.items()}
    if len(set(lengths.values())) > 1:
        raise BatchError(f"columns of one batch have different numbers of rows: {lengths}")
    columns = {key: column if isinstance(column, Tensor) else _rows(column) for key, column in tensor_dict.items()}
    output = TensorDict(columns, batch_size=[next(iter(lengths.values()))] if lengths else [])
    return assign_non_tensor_dict(output, non_tensor_dict or {})


def split_non_tensors(
    tensor_dict: TensorDict,
) -> tuple[dict[str, Tensor], dict[str, list[Any]], dict[str, Any]]:
    """(tensors, one object per row, values of the whole batch), the parts that ``get_tensordict`` joins."""
    tensors: dict[str, Tensor] = {}
    rows: dict[str, list[Any]] = {}
    settings: dict[str, Any] = {}
    for key in tensor_dict.keys():  # noqa: SIM118
        value = tensor_dict.get(key)
        if isinstance(value, Tensor):
            tensors[str(key)] = value
        elif isinstance(value, NonTensorData):
            settings[str(key)] = value.data
        else:
            rows[str(key)] = value.tolist()
    return tensors, rows, settings


def index_select_tensor_dict(batch: TensorDict, indices: Tensor | list[int]) -> TensorDict:
    """Copies the rows ``indices``; ragged (nested) columns keep their lengths."""
    index = torch.as_tensor(indices, dtype=torch.long)
    if index.dim() != 1:
        raise BatchError(f"indices of shape {tuple(index.shape)}, expected one dimension")
    tensors, rows, settings = split_non_tensors(batch)
    columns: dict[str, Any] = {key: [values[row] for row in index.tolist()] for key, values in rows.items()}
    for key, tensor in tensors.items():
        if tensor.is_nested:
            pieces = tensor.unbind()
            chosen = [pieces[row] for row in index.tolist()]
            columns[key] = torch.nested.as_nested_tensor(chosen, layout=torch.jagged)
        else:
            columns[key] = tensor[index.to(tensor.device)]
    return get_tensordict(columns, settings)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Adds the columns of the second in place; one in both with different values is an error."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = tuple(tensor_dict1.batch_size), tuple(tensor_dict2.batch_size)
        raise BatchError(f"union of batches of size {sizes[0]} and {sizes[1]}")
    left, right = (dict(batch.items()) for batch in (tensor_dict1, tensor_dict2))
    for key, value in union_dict(_comparable(left), _comparable(right), "batch").items():
        if key not in left:
            tensor_dict1[key] = right[key] if not isinstance(value, Tensor) else value
    return tensor_dict1


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches of rows, ``epochs`` times over; ``dataloader_kwargs`` go to torch's ``DataLoader``."""
    num_rows = tensordict.batch_size[0]
    if num_rows % mini_batch_size:
        raise BatchError(f"a batch of {num_rows} rows does not divide into mini-batches of {mini_batch_size}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    settings: dict[str, Any] = {"generator": generator, "collate_fn": list, **(dataloader_kwargs or {})}
    loader: Any = torch.utils.data.DataLoader(range(num_rows), batch_size=mini_batch_size, **settings)  # type: ignore[arg-type]
    return (index_select_tensor_dict(tensordict, rows) for _ in range(epochs) for rows in loader)


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """AssertionError names the first difference in keys, types or values."""
    left, right = (dict(batch.items()) for batch in (tensordict1, tensordict2))
    if left.keys() != right.keys():
        raise BatchError(f"keys differ: {sorted(left)} and {sorted(right)}")
    for key in left:
        if type(left[key]) is not type(right[key]):
            raise BatchError(f"{key}: {type(left[key]).__name__} and {type(right[key]).__name__}")
        union_dict({key: _comparable(left)[key]}, {key: _comparable(right)[key]}, "the second TensorDict")


def pop(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Moves the columns ``keys`` into a TensorDict of their own; an unknown key is a KeyError."""
    wanted = list(keys)
    missing = [key for key in wanted if key not in tensordict.keys()]  # noqa: SIM118
    if missing:
        raise KeyError(f"no columns {missing}, only {sorted(map(str, tensordict.keys()))}")
    output = tensordict.select(*wanted)
    for key in wanted:
        del tensordict[key]
    return output


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Appends copies of the first rows until ``size_divisor`` divides the length; returns (batch, rows added)."""
    num_rows = len(data)
    if num_rows == 0:
        raise BatchError(f"an empty batch cannot be padded to a multiple of {size_divisor}")
    pad_size = -num_rows % size_divisor
    if pad_size == 0:
        return data, 0
    return index_select_tensor_dict(data, [row % num_rows for row in range(num_rows + pad_size)]), pad_size


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """The batch without its last ``pad_size`` rows."""
    return index_select_tensor_dict(data, list(range(len(data) - pad_size))) if pad_size else data


def _rows(column: Sequence[Any]) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(value) for value in column])


def _comparable(columns: dict[Any, Any]) -> dict[Any, Any]:
    """Columns in types that ``union_dict`` compares: ragged ones and objects as lists."""
    output: dict[Any, Any] = {}
    for key, value in columns.items():
        if isinstance(value, Tensor):
            output[key] = list(value.unbind()) if value.is_nested else value
        else:
            output[key] = unwrap_non_tensor_data(value) if isinstance(value, NonTensorData) else value.tolist()
    return output
