"""TensorDicts that hold objects beside tensors (upstream: ``verl.utils.tensordict_utils``).

A value of the whole batch is ``NonTensorData``, one object per row is ``NonTensorStack`` (tensordict's own types).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from verl.utils.errors import BatchError


def assign_non_tensor_dict(tensor_dict: TensorDict, non_tensor_dict: dict[str, Any]) -> TensorDict:
    """Adds values of the whole batch, in place."""
    for key, value in non_tensor_dict.items():
        assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Adds one value of the whole batch."""
    tensor_dict[key] = NonTensorData(val)


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


def _rows(column: Sequence[Any]) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(value) for value in column])
