"""Tensors stored in files, of which any slice is read with ``pread``."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from hf_formats.ranges import Ranges

PAGE_BYTES = 4096  # the least that a file system reads
_STAGE_BYTES = 8 << 20


@dataclass(frozen=True)
class FileRegion:
    """A row-major tensor that begins ``offset`` bytes after the start of ``file``."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileReader:
    """Reads slices of tensors and counts the bytes. Files stay open until ``close`` or until the reader is freed."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        weakref.finalize(self, _close_all, self._descriptors)

    def __reduce__(self) -> tuple[type[FileReader], tuple[()]]:
        return FileReader, ()  # another process opens the files itself

    def close(self) -> None:
        """Close the files."""
        _close_all(self._descriptors)

    def read(self, name: str, region: FileRegion, ranges: Ranges | None = None) -> torch.Tensor:
        """Return the slice (default: all) as a new CPU tensor; errors call the tensor ``name``.

        ValueError when the slice is outside of the tensor or the file too short; OSError when the file cannot be read.
        """
        shape = region.shape or (1,)
        ranges = ranges or tuple((0, size) for size in shape)
        if len(ranges) != len(shape) or not all(
            0 <= start <= stop <= size for (start, stop), size in zip(ranges, shape, strict=True)
        ):
            raise ValueError(f"{name} has shape {region.shape}; {ranges} is no slice of it")
        out = torch.empty([stop - start for start, stop in ranges], dtype=region.dtype)
        if out.numel():
            rows = out.view(-1).view(torch.uint8)
            for start, stride, block in _blocks_of_rows(shape, ranges, region.dtype.itemsize, rows):
                self._read_rows(name, region.file, region.offset + start, stride, block)
        return out if region.shape else out.view(())

    def read_bytes(self, name: str, file: Path, start: int, num_bytes: int) -> bytes:
        """Return bytes of a file; raises the errors of ``read``."""
        content = bytearray(num_bytes)
        self._read_bytes(name, file, start, memoryview(content))
        return bytes(content)

    def _read_rows(self, name: str, file: Path, start: int, stride: int, rows: torch.Tensor) -> None:
        """Fill uint8 ``rows`` [N, B]: row n with the B bytes from ``start + n * stride`` on."""
        count, num_bytes = rows.shape
        if count == 1 or stride - num_bytes >= PAGE_BYTES:
            buffer = rows.view(-1).numpy().data
            for row in range(count):
                self._read_bytes(name, file, start + row * stride, buffer[row * num_bytes : (row + 1) * num_bytes])
            return
        step = max(1, _STAGE_BYTES // stride)  # every page holds a row, so one call reads many rows
        stage = torch.empty(min(step, count), stride, dtype=torch.uint8)
        for first in range(0, count, step):
            part = rows[first : first + step]
            used = stage.view(-1).numpy().data[: len(part) * stride - (stride - num_bytes)]
            self._read_bytes(name, file, start + first * stride, used)
            part.copy_(stage[: len(part), :num_bytes])

    def _read_bytes(self, name: str, file: Path, start: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor(file), [buffer[done:]], start + done)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}, while {name} was read from it", str(file)) from error
            if count == 0:
                raise ValueError(f"{file} ends at byte {start + done}, before the end of {name}: it is truncated")
            done += count
        self.bytes_read += done

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[file]


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _blocks_of_rows(
    shape: tuple[int, ...], ranges: Ranges, itemsize: int, out: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (first byte, stride in bytes, uint8 [rows, bytes of a row] of ``out``) of each group of evenly spaced rows.

    A row is contiguous in the file: a range of the last dimension that is cut, and all dimensions after it.
    """
    cut = max((dim for dim, part in enumerate(ranges) if part != (0, shape[dim])), default=0)
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    row_bytes = (ranges[cut][1] - ranges[cut][0]) * strides[cut]
    num_rows = ranges[cut - 1][1] - ranges[cut - 1][0] if cut else 1
    origin = sum(start * stride for (start, _), stride in zip(ranges, strides, strict=True))
    blocks = out.view(-1, num_rows, row_bytes)
    outer = [range(0, (ranges[dim][1] - ranges[dim][0]) * strides[dim], strides[dim]) for dim in range(cut - 1)]
    for block, offsets in zip(blocks, product(*outer), strict=True):
        yield origin + sum(offsets), strides[cut - 1] if cut else row_bytes, block
