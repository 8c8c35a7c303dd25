"""Files of ``torch.save`` written record by record, none of them held whole: a zip of stored, aligned records.

``torch.load(weights_only=True, mmap=True)`` reads them. All offsets follow from names and sizes, so a file's size is
known before it is written; only the checksum in a record's header is filled in after its data.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from mindspeed_llm.conversion.writer import ByteSlabs, StoredTensor

_ALIGNMENT = 64
_FULL = 0xFFFFFFFF  # a 32-bit field that says: see the 64-bit one
_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_END64, _LOCATOR = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_CRC_FIELD = 14  # of the local header
_STORAGES = {
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
}


@dataclass(frozen=True)
class TensorRef:
    """Stands in the pickled object for the tensor whose data is record ``data/{key}``."""

    key: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        storage = _StorageRef(self.key, self.dtype, step)
        arguments: tuple[Any, ...] = (storage, 0, self.shape, tuple(reversed(strides)), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


@dataclass(frozen=True)
class _StorageRef:
    key: int
    dtype: torch.dtype
    num_elements: int


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> tuple[Any, ...] | None:
        if not isinstance(value, _StorageRef):
            return None
        return "storage", _STORAGES[value.dtype], str(value.key), "cpu", value.num_elements


@dataclass(frozen=True)
class _Record:
    name: bytes
    num_bytes: int
    header_offset: int
    data_offset: int


def torch_file_layout(content: object, tensors: Sequence[StoredTensor], stem: str) -> TorchFile:
    """The file of ``content``, an object in which ``TensorRef(i, ...)`` stands for ``tensors[i]``."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(content)
    small = {"data.pkl": buffer.getvalue(), "byteorder": b"little", "version": b"3\n"}
    sizes = {name: len(value) for name, value in small.items()}
    sizes |= {f"data/{key}": tensor.num_bytes for key, tensor in enumerate(tensors)}
    records, end = [], 0
    for name, num_bytes in sizes.items():
        record = _place(f"{stem}/{name}".encode(), num_bytes, end)
        records.append(record)
        end = record.data_offset + num_bytes
    return TorchFile(tuple(tensors), tuple(small.values()), tuple(records))


@dataclass(frozen=True)
class TorchFile:
    """Where everything lies in one file; the records of ``small`` come first, then one for each tensor."""

    tensors: tuple[StoredTensor, ...]
    small: tuple[bytes, ...]
    records: tuple[_Record, ...]

    @property
    def offsets(self) -> dict[str, int]:
        """Tensor name -> offset of its data."""
        data = self.records[len(self.small) :]
        return {tensor.name: record.data_offset for tensor, record in zip(self.tensors, data, strict=True)}

    @property
    def num_bytes(self) -> int:
        return self._end + len(self._directory([0] * len(self.records)))

    def write(self, stream: BinaryIO, slabs: Callable[[StoredTensor], ByteSlabs]) -> Mapping[str, int]:
        """Write the file from the stream's position on; returns ``offsets``, which count from there."""
        start, checksums = stream.tell(), []
        for record, value in zip(self.records, self.small, strict=False):
            checksums.append(zlib.crc32(value))
            stream.write(_local_header(record, checksums[-1]) + value)
        for record, tensor in zip(self.records[len(self.small) :], self.tensors, strict=True):
            stream.write(_local_header(record, 0))
            data = slabs(tensor)
            for slab in data:
                stream.write(slab)
            checksums.append(data.crc32)
            stream.seek(start + record.header_offset + _CRC_FIELD)
            stream.write(data.crc32.to_bytes(4, "little"))
            stream.seek(start + record.data_offset + record.num_bytes)
        stream.write(self._directory(checksums))
        return self.offsets

    @property
    def _end(self) -> int:
        return self.records[-1].data_offset + self.records[-1].num_bytes

    def _directory(self, checksums: Sequence[int]) -> bytes:
        entries = b"".join(_central_header(record, crc) for record, crc in zip(self.records, checksums, strict=True))
        count, start = len(self.records), self._end
        if start + len(entries) < _FULL and count < 0xFFFF:
            return entries + _END.pack(b"PK\5\6", 0, 0, count, count, len(entries), start, 0)
        end64 = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, len(entries), start)
        locator = _LOCATOR.pack(b"PK\6\7", 0, start + len(entries), 1)
        return entries + end64 + locator + _END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _FULL, _FULL, 0)


def _place(name: bytes, num_bytes: int, header_offset: int) -> _Record:
    """The record at ``header_offset`` with its data at the next multiple of 64 that leaves room for the header."""
    least = header_offset + _LOCAL.size + len(name) + len(_sizes64(num_bytes, num_bytes)) + 4
    return _Record(name, num_bytes, header_offset, -(-least // _ALIGNMENT) * _ALIGNMENT)


def _sizes64(*sizes: int) -> bytes:
    """The extra field with what does not fit in 32 bits; stored, so both sizes are the same."""
    wide = [size for size in sizes if size >= _FULL]
    return struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def _local_header(record: _Record, crc: int) -> bytes:
    size = min(record.num_bytes, _FULL)
    extra = _sizes64(record.num_bytes, record.num_bytes)
    padding = record.data_offset - record.header_offset - _LOCAL.size - len(record.name) - len(extra) - 4
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    fields = _LOCAL.pack(b"PK\3\4", 45, 0, 0, 0, 0, crc, size, size, len(record.name), len(extra))
    return fields + record.name + extra


def _central_header(record: _Record, crc: int) -> bytes:
    size, offset = min(record.num_bytes, _FULL), min(record.header_offset, _FULL)
    extra = _sizes64(record.num_bytes, record.num_bytes, record.header_offset)
    sizes = (crc, size, size, len(record.name), len(extra))
    return _CENTRAL.pack(b"PK\1\2", 45, 45, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, offset) + record.name + extra
