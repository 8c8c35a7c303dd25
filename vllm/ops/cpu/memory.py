"""Memory for the large results of a step on a CPU, apart from the allocator's heap.

A prefill step makes and drops tensors of megabytes by the dozen, of other sizes in every step. In glibc's heap small
things that last end up between them, and a hole that an aligned block leaves does not take the next one of its size:
after some steps the heap is several times of what is in use at once. Here nothing lasts: after a step all is free, in
one piece again.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from math import prod

import numpy as np
import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # of what is worth the Python; a decode step's results are smaller
_SEGMENT_BYTES = 64 << 20  # addresses, not memory: pages are taken when they are first written, and kept
_ALIGNMENT = 64
_APART_BYTES = 320  # of two pieces: at the same place of a page, one's reads would wait for the other's writes


class _Lease(np.ndarray):
    """A piece while tensors use it: their storage holds the only reference."""


class _Segment:
    """One mapping; pieces of it are given out lowest address first, so that few pages are ever touched."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._bytes = np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE), dtype=np.uint8)
        self._holes = [(0, num_bytes)]  # [start, stop), ascending, never side by side

    @property
    def is_free(self) -> bool:
        return self._holes == [(0, self.num_bytes)]

    def take(self, num_bytes: int) -> tuple[int, np.ndarray] | None:
        """(where, the piece); None when no hole is large enough."""
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= num_bytes:
                rest = start + num_bytes
                self._holes[index : index + 1] = [(rest, stop)] if rest < stop else []
                return start, self._bytes[start:rest]
        return None

    def give_back(self, start: int, num_bytes: int) -> None:
        stop = start + num_bytes
        at = next((i for i, hole in enumerate(self._holes) if hole[0] > start), len(self._holes))
        first = last = at
        if at > 0 and self._holes[at - 1][1] == start:
            first, start = at - 1, self._holes[at - 1][0]
        if at < len(self._holes) and self._holes[at][0] == stop:
            last, stop = at + 1, self._holes[at][1]
        self._holes[first:last] = [(start, stop)]


class StepMemory:
    """Gives out uninitialised tensors, to one thread; what they held is free when they are gone."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        # Tensors may go at any moment, also within `empty`, where garbage is collected.
        self._returned: deque[tuple[_Segment, int, int]] = deque()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """As ``torch.empty``."""
        self._take_back()
        tensor_bytes = dtype.itemsize * prod(shape)
        num_bytes = -(-tensor_bytes // _ALIGNMENT) * _ALIGNMENT + _APART_BYTES
        segment, start, piece = self._find(num_bytes)
        lease = piece.view(_Lease)
        weakref.finalize(lease, self._returned.append, (segment, start, num_bytes)).atexit = False
        return torch.from_numpy(lease)[:tensor_bytes].view(dtype).view(shape)

    def release(self) -> None:
        """Give back every segment that no tensor uses."""
        self._take_back()
        self._segments = [segment for segment in self._segments if not segment.is_free]

    def _find(self, num_bytes: int) -> tuple[_Segment, int, np.ndarray]:
        for segment in self._segments:
            if found := segment.take(num_bytes):
                return segment, *found
        self._segments.append(_Segment(max(num_bytes, _SEGMENT_BYTES)))
        return self._find(num_bytes)

    def _take_back(self) -> None:
        while self._returned:
            segment, start, num_bytes = self._returned.popleft()
            segment.give_back(start, num_bytes)
