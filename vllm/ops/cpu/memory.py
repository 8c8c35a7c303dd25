"""Memory for the large results of a step on a CPU, outside the allocator's heap.

A prefill step allocates and frees dozens of tensors of several megabytes, with other sizes in every step. In glibc's
heap small long-lived blocks end up between them, and the hole that an aligned block leaves does not fit the next one of
its size: after some steps the heap is several times as large as what is in use. Here nothing outlives a step, after
which every segment is free and in one piece.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from math import prod

import numpy as np
import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # smaller results, such as a decode step's, are not worth the Python
_SEGMENT_BYTES = 64 << 20  # address space, not memory: a page is taken when it is first written, and then kept
_ALIGNMENT = 64
_GAP_BYTES = 320  # between two pieces: at the same offset in a page, one's reads would wait for the other's writes


class _Lease(np.ndarray):
    """A piece in use: only the storage of its tensors refers to it."""


def leased(piece: np.ndarray, give_back: Callable[..., None], *args: object) -> Tensor:
    """The uint8 `piece` as a tensor; calls give_back(*args) when no tensor uses its memory any more."""
    lease = piece.view(_Lease)
    weakref.finalize(lease, give_back, *args).atexit = False
    return torch.from_numpy(lease)


class _Segment:
    """One mapping. The hole with the lowest address is used first, so that few pages are ever touched."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._bytes = np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE), dtype=np.uint8)
        self._holes = [(0, num_bytes)]  # [start, stop), ascending, never adjacent

    @property
    def is_free(self) -> bool:
        return self._holes == [(0, self.num_bytes)]

    def allocate(self, num_bytes: int) -> tuple[int, np.ndarray] | None:
        """Return (start, the piece), or None when no hole is large enough."""
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= num_bytes:
                rest = start + num_bytes
                self._holes[index : index + 1] = [(rest, stop)] if rest < stop else []
                return start, self._bytes[start:rest]
        return None

    def free(self, start: int, num_bytes: int) -> None:
        stop = start + num_bytes
        at = next((i for i, hole in enumerate(self._holes) if hole[0] > start), len(self._holes))
        first = last = at
        if at > 0 and self._holes[at - 1][1] == start:
            first, start = at - 1, self._holes[at - 1][0]
        if at < len(self._holes) and self._holes[at][0] == stop:
            last, stop = at + 1, self._holes[at][1]
        self._holes[first:last] = [(start, stop)]


class StepMemory:
    """Allocates uninitialised tensors; their memory is free again when they are gone."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        # A tensor may be collected at any moment, also within `empty`, so its memory is freed by the next call.
        self._returned: deque[tuple[_Segment, int, int]] = deque()
        self._lock = threading.Lock()  # `release_all` may come from another thread
        _MEMORIES.add(self)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        tensor_bytes = dtype.itemsize * prod(shape)
        num_bytes = -(-tensor_bytes // _ALIGNMENT) * _ALIGNMENT + _GAP_BYTES
        with self._lock:
            self._free_returned()
            segment, start, piece = self._find(num_bytes)
        memory = leased(piece, self._returned.append, (segment, start, num_bytes))
        return memory[:tensor_bytes].view(dtype).view(shape)

    def release(self) -> None:
        """Unmap every segment that no tensor uses."""
        with self._lock:
            self._free_returned()
            self._segments = [segment for segment in self._segments if not segment.is_free]

    def _find(self, num_bytes: int) -> tuple[_Segment, int, np.ndarray]:
        for segment in self._segments:
            if found := segment.allocate(num_bytes):
                return segment, *found
        self._segments.append(_Segment(max(num_bytes, _SEGMENT_BYTES)))
        return self._find(num_bytes)

    def _free_returned(self) -> None:
        while self._returned:
            segment, start, num_bytes = self._returned.popleft()
            segment.free(start, num_bytes)


_MEMORIES: weakref.WeakSet[StepMemory] = weakref.WeakSet()


def release_all() -> None:
    """Release the memory of all op tables of this process."""
    for memory in list(_MEMORIES):
        memory.release()
