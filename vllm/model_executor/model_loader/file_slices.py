"""Tensors that lie in files: any slice is read with ``pread``, and nothing beside it.

``mindspeed_llm`` and ``vllm`` hold this file byte for byte the same (``tests/mindspeed_llm/test_file_slices.py``).
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

Extent = tuple[tuple[int, int], ...]  # [start, stop) of every dimension

PAGE_BYTES = 4096  # file systems read no less
_STAGE_BYTES = 8 << 20


@dataclass(frozen=True)
class Region:
    """Where a row-major tensor lies: ``offset`` bytes from the start of ``file``."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileSlices:
    """Reads slices of tensors and counts the bytes; keeps the files open until ``close`` or its own end."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        weakref.finalize(self, _close_all, self._descriptors)

    def __reduce__(self) -> tuple[type[FileSlices], tuple[()]]:
        return FileSlices, ()  # in another process the files are opened anew

    def close(self) -> None:
        """Close the files."""
        _close_all(self._descriptors)

    def read(self, name: str, region: Region, extent: Extent | None = None) -> torch.Tensor:
        """The slice (default: all) as a new tensor on the CPU; ``name`` is what an error calls the tensor.

        ValueError for a slice that is not inside, or when the file ends before it; OSError when it cannot be read.
        """
        shape = region.shape or (1,)
        extent = extent or tuple((0, size) for size in shape)
        if len(extent) != len(shape) or not all(
            0 <= start <= stop <= size for (start, stop), size in zip(extent, shape, strict=True)
        ):
            raise ValueError(f"{name} has shape {region.shape}; {extent} is no slice of it")
        out = torch.empty([stop - start for start, stop in extent], dtype=region.dtype)
        if out.numel():
            rows = out.view(-1).view(torch.uint8)
            for start, stride, block in _blocks_of_rows(shape, extent, region.dtype.itemsize, rows):
                self._read_rows(name, region.file, region.offset + start, stride, block)
        return out if region.shape else out.view(())

    def read_bytes(self, name: str, file: Path, start: int, num_bytes: int) -> bytes:
        """Bytes of a file as they are; errors as of ``read``."""
        content = bytearray(num_bytes)
        self._read_bytes(name, file, start, memoryview(content))
        return bytes(content)

    def _read_rows(self, name: str, file: Path, start: int, stride: int, rows: torch.Tensor) -> None:
        """Fill uint8 ``rows`` [N, B] with B bytes from every ``stride``-th byte on."""
        count, num_bytes = rows.shape
        if count == 1 or stride - num_bytes >= PAGE_BYTES:
            buffer = rows.view(-1).numpy().data
            for row in range(count):
                self._read_bytes(name, file, start + row * stride, buffer[row * num_bytes : (row + 1) * num_bytes])
            return
        step = max(1, _STAGE_BYTES // stride)  # rows so close that every page is needed anyway: many in one call
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
    shape: tuple[int, ...], extent: Extent, itemsize: int, out: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first byte, bytes from row to row, uint8 [rows, bytes of a row] of ``out``) for evenly spaced rows of a slice.

    A row is what lies together: a range of the last dimension that is cut, and all of those behind it.
    """
    cut = max((dim for dim, part in enumerate(extent) if part != (0, shape[dim])), default=0)
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    row_bytes = (extent[cut][1] - extent[cut][0]) * strides[cut]
    num_rows = extent[cut - 1][1] - extent[cut - 1][0] if cut else 1
    origin = sum(start * stride for (start, _), stride in zip(extent, strides, strict=True))
    blocks = out.view(-1, num_rows, row_bytes)
    outer = [range(0, (extent[dim][1] - extent[dim][0]) * strides[dim], strides[dim]) for dim in range(cut - 1)]
    for block, offsets in zip(blocks, product(*outer), strict=True):
        yield origin + sum(offsets), strides[cut - 1] if cut else row_bytes, block
