"""Helpers of the whole engine."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def async_tensor_h2d(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on `device`: through pinned memory, because a copy from any other makes the host wait; the same memory
    where the device is the host. (vllm.utils.async_tensor_h2d)
    """
    shared = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return shared
    on_device = torch.empty(shared.shape, dtype=shared.dtype, device=device)
    return on_device.copy_(pinned_empty(shared).copy_(shared), non_blocking=True)


def pinned_empty(like: Tensor) -> Tensor:
    """Uninitialised pinned host memory of the shape and dtype of `like`."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
