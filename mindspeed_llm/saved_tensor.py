"""Where the elements lie inside what ``torch.save`` made of one tensor, so that slices can be read without the rest."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_formats.file_region import FileReader, FileRegion

_LOCAL_HEADER_BYTES = 30
_REBUILDERS = {"_rebuild_tensor_v2", "_rebuild_tensor_v3"}


def saved_region(
    slices: FileReader, name: str, file: Path, span: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype
) -> FileRegion:
    """The elements of the tensor that ``torch.save`` wrote to bytes ``span`` [start, stop) of ``file``.

    ValueError when that is no tensor of this shape, contiguous and uncompressed.
    """
    start, stop = span
    try:
        with zipfile.ZipFile(_Window(slices, name, file, start, stop)) as archive:
            pickled = next(entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
            described = _TensorUnpickler(io.BytesIO(archive.read(pickled))).load()
            if not isinstance(described, _Described):
                raise pickle.UnpicklingError(f"it is a {type(described).__name__}")
            entry = archive.getinfo(f"{pickled.removesuffix('data.pkl')}data/{described.storage}")
    except (zipfile.BadZipFile, pickle.UnpicklingError, StopIteration, KeyError, EOFError) as error:
        raise ValueError(f"{file}: bytes {start} to {stop} are no tensor that torch.save wrote: {error}") from error
    num_bytes = math.prod(shape) * dtype.itemsize
    if not described.is_whole(shape) or entry.compress_type != zipfile.ZIP_STORED or entry.file_size != num_bytes:
        raise ValueError(
            f"{file}: {name} is stored as {described.size} with strides {described.stride} in {entry.file_size} bytes; "
            f"{shape} of {dtype}, contiguous and uncompressed, was expected"
        )
    header = slices.read_bytes(name, file, start + entry.header_offset, _LOCAL_HEADER_BYTES)
    skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return FileRegion(file, start + entry.header_offset + _LOCAL_HEADER_BYTES + skipped, shape, dtype)


@dataclass(frozen=True)
class _Described:
    """What the pickle of a tensor says: which record holds its storage, and how it lies there."""

    storage: str
    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        is_dense = all(
            size < 2 or found == stride for size, found, stride in zip(shape, self.stride, strides, strict=False)
        )
        return self.start == 0 and self.size == shape and is_dense


class _TensorUnpickler(pickle.Unpickler):
    """Takes a tensor's description from its pickle and runs nothing that the pickle names."""

    def persistent_load(self, pid: Any) -> str:
        return str(pid[2])

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _REBUILDERS:
            return lambda storage, start, size, stride, *_: _Described(storage, start, tuple(size), tuple(stride))
        if module == "collections" and name == "OrderedDict":
            return OrderedDict
        if module == "torch" and (name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)):
            return name
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return name
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a plain tensor does not")


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
