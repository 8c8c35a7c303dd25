"""Helpers of the whole engine."""

from __future__ import annotations

import torch
from torch import Tensor

HAS_NO_STREAM = ("cpu", "meta")  # devices to which a copy waits for nothing


def async_h2d(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on ``device``: through pinned memory, because a copy from any other makes the host wait.

    A tensor that is on an accelerator, or stays on the host, is returned as it is.
    """
    if device.type in HAS_NO_STREAM or x.device.type != "cpu":
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
    return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(pinned, non_blocking=True)
