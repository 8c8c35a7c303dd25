"""The host as a device that captures graphs: a graph is its call, replayed by calling it again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.ops.contract import RolloutOps
from vllm.platforms import CapturedGraph, GraphPool
from vllm.platforms.cpu import CpuPlatform

DEVICE = "tests.vllm.capturing_platform:CapturingPlatform"


class CapturingPool(GraphPool):
    """As on a device, an output holds nothing until the first replay, and every replay writes the same memory."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = self.num_released = 0

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        output = run().fill_(float("nan"))
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            output.copy_(run())

        def release() -> None:
            self.num_released += 1

        return CapturedGraph(output, replay, release)


class CapturingPlatform(CpuPlatform):
    """Keeps the pools that it made; graphs end with a sleep."""

    keeps_graphs_over_sleep = False

    def __init__(self) -> None:
        self.pools: list[CapturingPool] = []

    def graph_pool(self) -> GraphPool:
        self.pools.append(CapturingPool())
        return self.pools[-1]

    def graph_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        return []


class ShrinkingPlatform(CpuPlatform):
    """Has less memory for the KV cache every time it is asked."""

    def __init__(self) -> None:
        self.budget_bytes = 2**17

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        self.budget_bytes = self.budget_bytes * 3 // 4
        return self.budget_bytes
