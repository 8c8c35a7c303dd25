"""What every check of a die shares: the die, its clock, and how a value is compared with the one expected."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.doctor.finding import Finding
from vllm.platforms import Platform

NUM_TIMED = 5
SIMULATOR = "npusim"  # the package of tests/npu, importable where dies are simulated


@dataclass(frozen=True)
class Die:
    """The die of one rank."""

    device: torch.device
    platform: Platform
    rank: int
    num_dies: int

    def seconds(self, run: Callable[[], object]) -> float:
        """The median time of a launch and a wait, warm; on a simulated die, where it means nothing, of one launch."""
        times = []
        for _ in range(1 if is_simulated() else 1 + NUM_TIMED):
            self.platform.synchronize()
            start = time.perf_counter()
            run()
            self.platform.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:] or times)


@dataclass(frozen=True)
class Check:
    """One row: its name and what finds it out on a die."""

    name: str
    find: Callable[[Die], Finding]


def is_simulated() -> bool:
    return importlib.util.find_spec(SIMULATOR) is not None


def difference(found: Tensor, expected: Tensor, tolerance: float = 0.0) -> str | None:
    """How two tensors differ; None when no value is further off than ``tolerance`` times the largest."""
    found, expected = found.cpu(), expected.cpu()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{tuple(found.shape)} {found.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    is_wrong = found != expected
    if tolerance:
        gap = (found.float() - expected.float()).abs()
        is_wrong = ~(gap <= tolerance * expected.float().abs().max())  # a NaN is wrong, too
    return f"{int(is_wrong.sum())} of {is_wrong.numel()} values are wrong" if is_wrong.any() else None


def in_ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
