"""What the engine must know of a kind of device; a vendor package plugs in by a dotted "module:Class" string."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

ACTIVATION_FRACTION = 0.1  # of the allowed memory, left for activations and communication buffers


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: what is free now and what there is."""

    free_bytes: int
    total_bytes: int


class Platform(ABC):
    """One kind of device. Constructing a platform touches no device; the methods do."""

    name: ClassVar[str]
    dist_backend: ClassVar[str]  # of torch.distributed
    rollout_ops: ClassVar[str]  # dotted provider of the op table written for this device
    supported_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Make device `local_rank` of this host the current one and return it."""

    @abstractmethod
    def memory(self, device: torch.device) -> DeviceMemory:
        """What `device` has free, cached blocks of torch's allocator not counted as used."""

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        """Bytes the KV cache may take when the engine may use `utilization` of the device and the weights are already
        on it.
        """
        memory = self.memory(device)
        allowed = int(memory.total_bytes * utilization)
        used = memory.total_bytes - memory.free_bytes
        return max(0, allowed - used - int(allowed * ACTIVATION_FRACTION))

    def empty_cache(self) -> None:  # noqa: B027 - a host has no allocator cache to give back
        """Give the allocator's unused blocks back to the device."""

    def synchronize(self) -> None:  # noqa: B027 - a host has no queue
        """Wait for the work queued on the current device."""

    def config_problems(self, block_size: int, dtype: str) -> list[str]:
        """What of a configuration this device cannot do, one sentence each."""
        if dtype not in self.supported_dtypes:
            return [f"dtype={dtype} is not supported on {self.name}; use one of {', '.join(self.supported_dtypes)}"]
        return []
