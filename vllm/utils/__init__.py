"""Helpers of the whole engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

HAS_NO_STREAM = ("cpu", "meta")  # devices to which a copy waits for nothing
_FROZEN_AT_START = gc.get_freeze_count()  # Python 3.12 freezes a few hundred objects of its own


def async_tensor_h2d(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on `device`: through pinned memory, because a copy from any other makes the host wait; the same memory
    where the device is the host. (vllm.utils.async_tensor_h2d)
    """
    shared = torch.from_numpy(np.ascontiguousarray(array))
    if device.type in HAS_NO_STREAM:
        return shared.to(device)
    on_device = torch.empty(shared.shape, dtype=shared.dtype, device=device)
    return on_device.copy_(pinned_empty(shared).copy_(shared), non_blocking=True)


@contextmanager
def frozen_gc_heap() -> Iterator[None]:
    """Inside, Python's collector looks at new objects only: a walk over all that a process has would stop a step for
    tenths of a second. (vllm.utils.gc_utils.freeze_gc_heap)
    """
    is_ours = gc.get_freeze_count() <= _FROZEN_AT_START
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def pinned_empty(like: Tensor) -> Tensor:
    """Uninitialised pinned host memory of the shape and dtype of `like`."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def last_contiguous(x: Tensor) -> Tensor:
    """x, or a copy of it, whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
