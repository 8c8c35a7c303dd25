"""What the engine must know of a kind of device; a vendor package plugs in by a dotted "module:Class" string."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.ops.contract import RolloutOps

ACTIVATION_FRACTION = 0.1  # of the allowed memory, left for activations, graphs and communication buffers


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: what is free now and what there is."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class RecordedGraph:
    """Device work recorded once: every replay runs it again on the memory that it was recorded with."""

    output: Tensor  # of the recorded call; a replay writes it anew
    replay: Callable[[], None]
    release: Callable[[], None]  # forget the work and give its memory back to the pool


class GraphPool(ABC):
    """Records device work. Its graphs share memory, so one ends before the next begins."""

    @abstractmethod
    def capture(self, run: Callable[[], Tensor]) -> RecordedGraph:
        """Record the device work of `run`, which has run before (kernels, workspaces and communicators exist).

        Recording does not run it: the output holds nothing before the first replay. `run` may neither read the device
        nor make tensors that outlive the graph.
        """


class Platform(ABC):
    """One kind of device. Constructing a platform touches no device; the methods do."""

    name: ClassVar[str]
    dist_backend: ClassVar[str]  # of torch.distributed
    rollout_ops: ClassVar[str]  # dotted provider of the op table written for this device
    supported_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    supported_kv_layouts: ClassVar[tuple[str, ...]] = ("nd",)
    holds_fp8: ClassVar[bool] = True  # whether tensors of float8_e4m3fn exist there
    recorded_logits: ClassVar[int] = 0  # bytes of logits that a graph may make; more are made after it
    holds_values: ClassVar[bool] = True  # False: tensors have shapes alone, and no weights are made or read for them

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Make device `local_rank` of this host the current one and return it."""

    def num_devices(self) -> int:
        """How many devices of this host the process may use."""
        return 1

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

    def exchange_device(self, device: torch.device) -> torch.device:
        """Where lie the few values of the host that ranks tell each other: on `device`, as its collectives want it."""
        return device

    def empty_cache(self) -> None:  # noqa: B027 - not every kind of device has an allocator cache
        """Give the allocator's unused blocks back to the device."""

    def prefer_large_pages(self, tensor: Tensor) -> None:  # noqa: B027 - devices have large pages anyway
        """Ask for large pages under memory that is read from one end to the other in every step."""

    def synchronize(self) -> None:  # noqa: B027 - a host has no queue
        """Wait for the work queued on the current device."""

    def graph_pool(self) -> GraphPool | None:
        """A new pool for graphs, None when this kind of device records none."""
        return None

    def config_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        """What of a configuration this device cannot do with this op table, one sentence each; touches no device."""
        problems = []
        if config.model.dtype not in self.supported_dtypes:
            problems.append(
                f"dtype={config.model.dtype} is not supported on {self.name}; use one of "
                f"{', '.join(self.supported_dtypes)}"
            )
        layout = config.cache.kv_cache_layout
        if layout not in self.supported_kv_layouts:
            problems.append(
                f"kv_cache_layout={layout} is not supported on {self.name}; use "
                f"{' or '.join(self.supported_kv_layouts)}"
            )
        if config.model.quantization == "fp8" and not self.holds_fp8:
            problems.append(f'quantization: {self.name} has no FP8 tensors; set quantization="dequantize"')
        if not config.compilation.enforce_eager:
            problems += self.graph_problems(config, ops)
        return problems

    def graph_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        """Why decode steps cannot be recorded as graphs here, one sentence each."""
        return [f"enforce_eager=False: {self.name} records no graphs; set enforce_eager=True"]


def table_problems(ops: RolloutOps) -> list[str]:
    """`Platform.graph_problems` of a device that records graphs: what of the op table cannot be recorded."""
    if not ops.not_capturable:
        return []
    return [
        f"enforce_eager=False: {', '.join(ops.not_capturable)} of the op table cannot be recorded as a graph; set "
        "enforce_eager=True, or rollout_ops to a table written for the device"
    ]
