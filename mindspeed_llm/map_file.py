"""Tensors inside files, read by mapping just the rows that are asked for; a mapping ends when its tensor is let go."""

from __future__ import annotations

import math
import mmap

import torch

from hf_formats.file_region import FileRegion
from hf_formats.ranges import Ranges

_WILL_NEED_BYTES = 1 << 20  # below this the system's own read-ahead is as good


def read_region(region: FileRegion, ranges: Ranges | None = None) -> torch.Tensor:
    """The slice (default: all) of a tensor as a view of its file: nothing is read until it is used.

    Only the rows (dim 0) that ``ranges`` touches are mapped, privately: a write would never reach the file.
    """
    if ranges is None:
        ranges = tuple((0, size) for size in region.shape)
    shape = tuple(stop - start for start, stop in ranges)
    if not math.prod(shape):
        return torch.empty(shape, dtype=region.dtype)
    row_elements = math.prod(region.shape[1:])
    start, stop = ranges[0] if ranges else (0, 1)
    first_byte = region.offset + start * row_elements * region.dtype.itemsize
    count = (stop - start) * row_elements
    aligned = first_byte - first_byte % mmap.ALLOCATIONGRANULARITY
    length = first_byte - aligned + count * region.dtype.itemsize
    with region.file.open("rb") as stream:
        mapping = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_COPY, offset=aligned)
    if length >= _WILL_NEED_BYTES and hasattr(mmap, "MADV_WILLNEED"):
        mapping.madvise(mmap.MADV_WILLNEED)
    rows = torch.frombuffer(mapping, dtype=region.dtype, count=count, offset=first_byte - aligned)
    rows = rows.view(shape[:1] + region.shape[1:])
    return rows[(slice(None), *(slice(a, b) for a, b in ranges[1:]))] if ranges else rows
