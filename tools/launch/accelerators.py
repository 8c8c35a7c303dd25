"""Which accelerators this machine has, without loading torch where it has none."""

from __future__ import annotations

import os
from pathlib import Path

CPU = "cpu"
DEV = Path("/dev")


def find_accelerator() -> str:
    """npu where this machine has Ascend device files, cuda where torch can use a GPU, else cpu."""
    if list(DEV.glob("davinci[0-9]*")):
        return "npu"
    if list(DEV.glob("nvidia[0-9]*")):
        import torch  # takes seconds to import: only where there may be a GPU

        return "cuda" if torch.cuda.is_available() else CPU
    return CPU


def count_accelerators(accelerator: str) -> int:
    """How many of these devices a process sees here; 0 on a CPU."""
    if accelerator == "npu":
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        return len(list(DEV.glob("davinci[0-9]*")) if visible is None else visible.replace(",", " ").split())
    if accelerator == "cuda":
        import torch

        return torch.cuda.device_count()
    return 0
