"""Batches between the controller and the workers, under upstream's module and names (``verl.protocol``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.data_proto import DataProto, DataProtoItem
from verl.protocol_storage import (
    AUTO_PADDING,
    BY_RANK,
    DataProtoConfig,
    list_of_dict_to_dict_of_list,
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
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
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


def _ray_get(reference: Any) -> Any:
    return load_provider("ray:get")(reference)
