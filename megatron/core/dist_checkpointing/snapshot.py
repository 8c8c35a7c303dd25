"""A copy of tensors in memory that another process can take over; it is freed when its last user exits."""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64


class Snapshot:
    """Tensors and a picklable description of what to do with them, in one anonymous file.

    The file has no name and is not on a disk (Linux): it is freed when the last process that has it open exits, for
    whatever reason, and it is not limited by ``/dev/shm``, which containers keep small. ``handle`` is passed to the
    other process, which opens it with ``read_snapshot``; ``close`` releases the memory on this side.
    """

    def __init__(self, tensors: Sequence[Tensor], description: Any) -> None:
        records, end = [], 0
        for tensor in tensors:
            records.append((end, tensor.dtype, tuple(tensor.shape)))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        tail = pickle.dumps((records, description))
        self.num_bytes = end + len(tail)
        self.handle = _anonymous_file(self.num_bytes)
        self._tail_at = end
        with mmap.mmap(self.handle, self.num_bytes) as memory:
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            _copy_all(tensors, [_view(flat, *record) for record in records])
            memory[end:] = tail
            del flat

    @property
    def address(self) -> str:
        """The argument of ``read_snapshot`` in the process that inherits the file."""
        return f"{self.handle}:{self._tail_at}:{self.num_bytes}"

    def close(self) -> None:
        os.close(self.handle)


def read_snapshot(address: str) -> tuple[list[Tensor], Any]:
    """The tensors and the description; the memory is freed with the last of the tensors."""
    handle, tail_at, num_bytes = map(int, address.split(":"))
    memory = mmap.mmap(handle, num_bytes)
    os.close(handle)
    records, description = pickle.loads(memory[tail_at:])
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return [_view(flat, *record) for record in records], description


def _anonymous_file(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, num_bytes)
    return handle


def _view(flat: Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return flat[begin : begin + num_bytes].view(dtype).view(shape)


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
