"""What the tests' device holds, by the count of torch_npu's allocator."""

from __future__ import annotations

import gc

import torch


def held_bytes() -> int:
    """Bytes of living tensors on the current device.

    A model that an earlier test left in a reference cycle is freed here, and not between two counts of one test.
    """
    gc.collect()
    torch.npu.synchronize()
    return int(torch.npu.memory_allocated())
