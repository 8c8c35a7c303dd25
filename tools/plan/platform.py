"""Platforms of planned devices: those of the run, with the memory of a device that does not exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tools.plan.device import DEVICE, MemoryMeter, PlannedDevice
from tools.plan.launches import launched
from vllm.platforms import CapturedGraph, DeviceMemory, GraphPool, Platform
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm_ascend.platform import NPUPlatform


class PlannedGraphPool(GraphPool):
    """Graphs that run again instead of being replayed; the pool holds as much memory as the largest needs."""

    def __init__(self, planned: PlannedDevice, keeps_all: bool) -> None:
        """keeps_all: memory that is freed during a capture stays in the pool, as on a CPU."""
        self._planned, self._keeps_all = planned, keeps_all
        self._held: list[Tensor] = []
        self._held_bytes = 0

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """See ``GraphPool.capture``; collectives are logged in the replays, not in the capture."""
        planned = self._planned
        with planned.log.paused(), planned.meter.paused(), planned.launches_apart(), MemoryMeter() as probe:
            output = run()
        needed = probe.total_bytes if self._keeps_all else max(0, probe.peak_bytes - self._held_bytes)
        if needed:
            self._held.append(torch.empty(needed, dtype=torch.uint8, device=DEVICE))
            self._held_bytes += needed

        def replay() -> None:
            with planned.meter.paused(), planned.launches_apart():
                run()
            launched()

        return CapturedGraph(output, replay, release=lambda: None)  # the memory belongs to the pool


class PlannedPlatform(Platform):
    """The part of a platform that stands for its device.

    Args:
        total_bytes: memory of the device.
        used_bytes: memory that neither torch nor a communicator has: the driver, contexts.
        planned: counts the rest.
    """

    holds_values = False

    def __init__(self, total_bytes: int, used_bytes: int, planned: PlannedDevice) -> None:
        self.total_bytes, self.used_bytes, self.planned = total_bytes, used_bytes, planned

    def device(self, local_rank: int) -> torch.device:
        return DEVICE

    def num_devices(self) -> int:
        return 1

    def memory(self, device: torch.device) -> DeviceMemory:
        self.planned.meter.settle()
        free = self.total_bytes - self.used_bytes - self.planned.meter.now_bytes
        return DeviceMemory(max(0, free), self.total_bytes)

    def exchange_device(self, device: torch.device) -> torch.device:
        """The host: replicas exchange values that the program depends on."""
        return torch.device("cpu")

    def group_options(self, group: str) -> None:
        """Groups of a plan have no backend."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def prefer_large_pages(self, tensor: Tensor) -> None:
        """There are no pages."""

    def graph_pool(self) -> GraphPool:
        return PlannedGraphPool(self.planned, keeps_all=self.name == "cpu")


class PlannedCpu(PlannedPlatform, CpuPlatform):
    """See ``PlannedPlatform``."""

    def free(self, tensor: Tensor, keeps_address: bool) -> int:
        """As without an address to keep: what is planned has none."""
        return super().free(tensor, keeps_address=False)


class PlannedCuda(PlannedPlatform, CudaPlatform):
    """See ``PlannedPlatform``."""


class PlannedNpu(PlannedPlatform, NPUPlatform):
    """See ``PlannedPlatform``."""

    def host_graph_problems(self) -> list[str | None]:
        """None: what is planned does not run on this machine."""
        return []

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        """As on every device: no cache of torch_npu's is to be emptied before."""
        return Platform.kv_cache_budget_bytes(self, device, utilization)


PLATFORMS: dict[str, type[PlannedPlatform]] = {"cpu": PlannedCpu, "cuda": PlannedCuda, "npu": PlannedNpu}
