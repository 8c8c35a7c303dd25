"""Where tensors lie inside what ``torch.save`` wrote, so that slices can be read without the rest."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_formats.file_region import FileReader, FileRegion
from hf_formats.listed_pickle import Names, load_listed

# What zipfile raises: RuntimeError where content is said to be encrypted, NotImplementedError for an unknown packing.
_NO_ARCHIVE = (zipfile.BadZipFile, zlib.error, StopIteration, KeyError, EOFError, RuntimeError, NotImplementedError)
_LOCAL_HEADER_BYTES = 30  # of a zip entry; its last two fields are the lengths of what follows, before the data


def saved_region(
    reader: FileReader, name: str, file: Path, span: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype
) -> FileRegion:
    """The elements of the tensor that ``torch.save`` wrote to bytes ``span`` [start, stop) of ``file``.

    ValueError when that is no tensor of this shape, contiguous and uncompressed.
    """
    found = saved_content(reader, name, file, span)
    if not isinstance(found, FileRegion) or (found.shape, found.dtype) != (shape, dtype):
        raise ValueError(
            f"{file}: {name} is stored as {found}; {shape} of {dtype}, contiguous and uncompressed, was expected"
        )
    return found


def saved_content(reader: FileReader, name: str, file: Path, span: tuple[int, int]) -> Any:
    """What ``torch.save`` wrote to bytes ``span`` of ``file``, with a ``FileRegion`` for each tensor.

    A tensor that is compressed or not contiguous is a text that says so. Nothing that the pickle names is run:
    ValueError when it names anything but tensors and plain containers, or when the bytes are no such file.
    """
    start, stop = span

    def region(key: str, dtype: torch.dtype, first: int, size: Any, stride: Any) -> FileRegion | str:
        entry = archive.getinfo(f"{root}data/{key}")
        shape, header_at = tuple(size), start + entry.header_offset
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        is_dense = all(size < 2 or given == dense for size, given, dense in zip(shape, stride, strides, strict=True))
        if not is_dense or entry.compress_type != zipfile.ZIP_STORED:
            return f"{shape} with strides {tuple(stride)}, compressed by method {entry.compress_type}"
        if (first + math.prod(shape)) * dtype.itemsize > entry.file_size:
            raise pickle.UnpicklingError(f"a tensor of shape {shape} ends behind its {entry.file_size} bytes")
        lengths = reader.read_bytes(name, file, header_at + _LOCAL_HEADER_BYTES - 4, 4)
        data_at = header_at + _LOCAL_HEADER_BYTES + sum(struct.unpack("<2H", lengths))
        return FileRegion(file, data_at + first * dtype.itemsize, shape, dtype)

    try:
        with zipfile.ZipFile(_Window(reader, name, file, start, stop)) as archive:
            root = next(entry for entry in archive.namelist() if entry.endswith("/data.pkl")).removesuffix("data.pkl")
            return _load(io.BytesIO(archive.read(f"{root}data.pkl")), region)
    except (pickle.UnpicklingError, *_NO_ARCHIVE) as error:
        raise ValueError(f"{file}: bytes {start} to {stop} are no tensor that torch.save wrote: {error}") from error


_STORAGES = {name: getattr(kind, "_dtype", None) for name, kind in vars(torch).items() if name.endswith("Storage")}
_PLAIN: Names = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    **{("torch", name): found for name, found in vars(torch).items() if isinstance(found, torch.dtype)},
    **{("torch", name): dtype for name, dtype in _STORAGES.items() if dtype is not None},
}


def _load(stream: io.BytesIO, region: Callable[..., Any]) -> Any:
    """Pass every tensor's description (storage, dtype, first element, size, stride) to ``region``."""
    rebuild: Names = {
        ("torch._utils", "_rebuild_tensor_v2"): lambda storage, *view: region(*storage, *view[:3]),
        # v3: the dtype is beside a storage without one
        ("torch._utils", "_rebuild_tensor_v3"): lambda storage, *view: region(storage[0], view[5], *view[:3]),
    }
    return load_listed(stream, _PLAIN | rebuild, "a plain tensor", lambda pid: (str(pid[2]), pid[1]))


class _Window(io.RawIOBase):
    """Bytes [start, stop) of a file as a file."""

    def __init__(self, slices: FileReader, name: str, file: Path, start: int, stop: int) -> None:
        super().__init__()
        self._slices, self._name, self._file = slices, name, file
        self._start, self._size, self._at = start, stop - start, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._size - self._at))
        target[:count] = self._slices.read_bytes(self._name, self._file, self._start + self._at, count)
        self._at += count
        return count
