"""Batches between the controller and the workers, under upstream's module and names (``verl.protocol``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verl.data_proto import DataProto, DataProtoItem
from verl.protocol_storage import (
    AUTO_PADDING,
    BY_RANK,
    DataProtoConfig,
    list_of_dict_to_dict_of_list,
    pack_tensor,
    tensors_of,
    union_numpy_dict,
    union_tensor_dict,
    unpack_tensor,
)
from verl.utils.errors import BatchError
from verl.utils.import_utils import load_provider

__all__ = [
    "AUTO_PADDING",
    "BY_RANK",
    "BatchError",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Appends copies of the first rows until ``size_divisor`` divides the length; returns (batch, rows added)."""
    if not isinstance(data, DataProto):
        raise BatchError(f"a {type(data).__name__} cannot be padded, expected a DataProto")
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """[B, ...] to [new_batch_size, B / new_batch_size, ...] in every column."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise BatchError(f"a batch of {len(data)} rows does not fold into {new_batch_size}")
    inner = len(data) // new_batch_size
    tensors = {key: tensor.reshape(new_batch_size, inner, *tensor.shape[1:]) for key, tensor in _columns(data).items()}
    arrays = {
        key: array.reshape(new_batch_size, inner, *array.shape[1:]) for key, array in data.non_tensor_batch.items()
    }
    return DataProto.from_dict(tensors, arrays, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The inverse of ``fold_batch_dim``: the first ``batch_dims`` dimensions become one."""
    tensors = {key: tensor.reshape(-1, *tensor.shape[batch_dims:]) for key, tensor in _columns(data).items()}
    arrays = {key: array.reshape(-1, *array.shape[batch_dims:]) for key, array in data.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, arrays, data.meta_info)


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """Stacks rows of one batch back into a batch, with the settings of the first."""
    first = x[0]
    rows = [tensors_of(item.batch) for item in x]
    return DataProto.from_dict(
        tensors={key: torch.stack([row[key] for row in rows]) for key in rows[0]},
        non_tensors={key: [item.non_tensor_batch[key] for item in x] for key in first.non_tensor_batch},
        meta_info=first.meta_info,
    )


def serialize_single_tensor(obj: Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    """(name of the dtype, shape, raw bytes) of a tensor."""
    dtype, shape, raw = pack_tensor(obj)
    return str(dtype).removeprefix("torch."), shape, raw.data


def deserialize_single_tensor(arr: Any) -> Tensor:
    """The inverse of ``serialize_single_tensor``; the tensor owns its memory."""
    name, shape, raw = arr
    return unpack_tensor(getattr(torch, name), tuple(shape), np.frombuffer(raw, dtype=np.uint8))


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, tuple[str, Any]]]:
    """(batch size, device, columns) in plain types; a ragged (nested) column as the list of its rows."""
    columns: dict[str, tuple[str, Any]] = {}
    for key, tensor in tensors_of(batch).items():
        if tensor.is_nested:
            layout = str(tensor.layout).removeprefix("torch.")
            columns[key] = layout, [serialize_single_tensor(row) for row in tensor.unbind()]
        else:
            columns[key] = "tensor", serialize_single_tensor(tensor)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), columns


def deserialize_tensordict(arr: Any) -> TensorDict:
    """The inverse of ``serialize_tensordict``."""
    batch_size, device, encoded = arr
    columns = {}
    for key, (kind, content) in encoded.items():
        if kind == "tensor":
            columns[key] = deserialize_single_tensor(content)
        else:
            rows = [deserialize_single_tensor(row) for row in content]
            columns[key] = torch.nested.as_nested_tensor(rows, layout=getattr(torch, kind))
    return TensorDict(columns, batch_size=batch_size, device=device)


@dataclass
class DataProtoFuture:
    """A batch that workers still compute: the result of a call with ``blocking=False``.

    It is passed to further calls as it is: each rank waits for its own part, and the controller for nothing.

    Attributes:
        collect_fn: joins the outputs of the futures into the batch.
        futures: one per rank: references of Ray, or objects with ``get()``.
        dispatch_fn: chooses a rank's part of the batch.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        """The batch that the outputs ``data`` make together."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """``chunks`` parts of the batch to come."""

        def part(batch: DataProto, index: int) -> DataProto:
            return batch.chunk(chunks)[index]

        return [DataProtoFuture(self.collect_fn, self.futures, _Part(part, index)) for index in range(chunks)]

    def get(self) -> Any:
        """Waits for the outputs and joins them; what a worker raised is raised."""
        outputs = [future.get() if hasattr(future, "get") else _ray_get(future) for future in self.futures]
        batch = self.collect_fn(outputs)
        return batch if self.dispatch_fn is None else self.dispatch_fn(batch)


@dataclass(frozen=True)
class _Part:
    """Chooses part ``index``; a class, since it travels to workers."""

    choose: Callable[[Any, int], Any]
    index: int

    def __call__(self, batch: Any) -> Any:
        return self.choose(batch, self.index)


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replaces ``data``'s rows by those of all ranks of the group, in rank order, on the device they are on.

    Collective; every rank has the same columns, also remote ones must be fetched first.
    """
    if data.row_refs is not None:
        raise BatchError(f"columns {sorted(data.row_refs.columns)} are on workers; fetch them first")
    parts: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, data.select(meta_info_keys=[]), group=process_group)
    device = next((tensor.device for tensor in _columns(data).values()), None)
    gathered = DataProto.concat(parts)
    if device is not None:
        gathered.to(device)
    data.batch, data.non_tensor_batch = gathered.batch, gathered.non_tensor_batch


def _ray_get(reference: Any) -> Any:
    return load_provider("ray:get")(reference)


def _columns(data: DataProto) -> dict[str, Tensor]:
    return tensors_of(data.batch)
