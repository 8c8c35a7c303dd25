"""Batches between the controller and the workers, under upstream's module and names (``verl.protocol``)."""

from __future__ import annotations

import numpy as np

from verl.data_proto import DataProto, DataProtoItem
from verl.protocol_storage import AUTO_PADDING, BY_RANK, list_of_dict_to_dict_of_list
from verl.utils.errors import BatchError

__all__ = [
    "AUTO_PADDING",
    "BY_RANK",
    "BatchError",
    "DataProto",
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
