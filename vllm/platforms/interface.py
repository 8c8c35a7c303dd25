"""What the engine needs to know about a kind of device; a vendor package plugs in by a dotted "module:Class"."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from vllm.config import default_capture_sizes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.ops.contract import RolloutOps

logger = logging.getLogger(__name__)

# torch's allocators put tensors up to this size into blocks that many share, so a freed one comes back elsewhere.
SHARED_BLOCK_BYTES = 1 << 20
ACTIVATION_FRACTION = 0.1  # share of the allowed memory that is left for activations, graphs and communication buffers


@dataclass(frozen=True)
class DeviceMemory:
    """The free and the total bytes of one device."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class CapturedGraph:
    """Device work that was captured once. A replay runs it again on the same memory."""

    output: Tensor  # the captured call's result; a replay overwrites it
    replay: Callable[[], None]
    release: Callable[[], None]  # forget the work and give its memory back to the pool


class GraphPool(ABC):
    """Captures device work. Its graphs share memory, so a replay ends before the next one starts."""

    runs_captures: ClassVar[bool] = False  # whether capture also does the work, so that the output holds its result

    @abstractmethod
    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """Capture the device work of `run`, which may neither read the device nor make tensors that outlive the graph.

        Unless the pool runs captures, `run` has run before (kernels, workspaces and communicators exist), and the
        output is uninitialised before the first replay.
        """


class Platform(ABC):
    """One kind of device. Constructing a platform touches no device; the methods do."""

    name: ClassVar[str]
    dist_backend: ClassVar[str]  # torch.distributed's name for it
    rollout_ops: ClassVar[str]  # dotted provider of the op table written for this device
    supported_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    supported_kv_layouts: ClassVar[tuple[str, ...]] = ("nd",)
    holds_fp8: ClassVar[bool] = True  # whether tensors of float8_e4m3fn exist there
    captured_logits_bytes: ClassVar[int] = 0  # the most logits that a graph computes; larger ones are computed after it
    # Whether graphs outlive a sleep, with their pool, if what they read comes back to its addresses (`free`).
    keeps_graphs_over_sleep: ClassVar[bool] = False
    has_reduce_scatter: ClassVar[bool] = True  # False: it sends as much as an all-reduce, and all-to-all is quicker
    holds_values: ClassVar[bool] = True  # False: tensors have only shapes, and no weights are read or initialised

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Make device `local_rank` of this host the current one and return it."""

    def num_devices(self) -> int:
        """Return how many devices of this host the process may use."""
        return 1

    def device_uuid(self, device: torch.device) -> str | None:
        """Return what names the device in every process, None where processes cannot open each other's memory of it."""
        return None

    @abstractmethod
    def memory(self, device: torch.device) -> DeviceMemory:
        """Return the memory of `device`; cached blocks of torch's allocator count as free."""

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        """Return the bytes that the KV cache may use, once the weights are loaded, with `utilization` of the device."""
        memory = self.memory(device)
        allowed = int(memory.total_bytes * utilization)
        used = memory.total_bytes - memory.free_bytes
        return max(0, allowed - used - int(allowed * ACTIVATION_FRACTION))

    def exchange_device(self, device: torch.device) -> torch.device:
        """Return the device for the few host values that ranks exchange: where its collectives expect tensors."""
        return device

    def group_options(self, group: str) -> Any:
        """Return the backend's options of the process groups called `group` (a field of ``ParallelState``) for
        ``torch.distributed.new_group``; None for its defaults.
        """
        return None

    def group_buffer_bytes(self, group: str) -> int:
        """Return the device memory that the communicator of such a group takes, once it is used, beside torch's."""
        return 0

    def empty_cache(self) -> None:  # noqa: B027 - not every kind of device has an allocator cache
        """Return the allocators' unused memory to the device."""

    def free(self, tensor: Tensor, keeps_address: bool) -> int:
        """Give back the memory of a tensor, whose values are lost, until `allocate`. Returns the bytes that stay.

        keeps_address: it shall then be where it was, as far as the device has a way.
        """
        storage = tensor.untyped_storage()
        if keeps_address and storage.nbytes() <= SHARED_BLOCK_BYTES:
            return storage.nbytes()
        storage.resize_(0)
        return 0

    def allocate(self, tensor: Tensor, zeroed: bool) -> None:
        """Give a tensor that `free` was called for its memory again; without `zeroed`, values are undefined."""
        storage, num_bytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        if storage.nbytes() != num_bytes:
            storage.resize_(num_bytes)
        if zeroed:
            tensor.zero_()

    def prefer_large_pages(self, tensor: Tensor) -> None:  # noqa: B027 - devices have large pages anyway
        """Ask for large pages for memory that every step reads from end to end."""

    def synchronize(self) -> None:  # noqa: B027 - a host has no queue
        """Wait for the work queued on the current device."""

    def graph_pool(self) -> GraphPool | None:
        """Return a new pool for graphs, or None when this kind of device captures none."""
        return None

    def config_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        """Return what this device and op table cannot do of a configuration, a sentence each; touches no device."""
        problems = ops.problems(config)
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
        for switch in ("multistream_overlap_shared_expert", "enable_multistream_mla"):
            if getattr(config.parallel, switch) and ops.run_beside is None:
                problems.append(f"{switch}=True: the op table for {self.name} has no second stream; leave it out")
        if config.compilation.enforce_eager is False:
            problems += [
                f"enforce_eager=False: {reason}; otherwise set enforce_eager=True, or None for graphs where they work"
                for reason in self.graph_problems(config, ops)
            ]
        return problems

    def default_capture_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """Return the numbers of sequences that graphs are captured for where the configuration gives none."""
        return default_capture_sizes(max_num_seqs)

    def graph_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        """Return why decode steps cannot be captured as graphs here, one sentence each."""
        return [f"{self.name} captures no graphs"]

    def with_graphs_decided(self, config: VllmConfig, ops: RolloutOps) -> VllmConfig:
        """Return the configuration whose `enforce_eager` is no longer None; a decision against graphs is logged."""
        config = self._with_fewer_sizes(config, ops)
        if config.compilation.enforce_eager is not None:
            return config
        reasons = self.graph_problems(config, ops)
        if reasons:
            logger.warning("enforce_eager is not set, and decode steps run eagerly: %s", "; ".join(reasons))
        return replace(config, compilation=replace(config.compilation, enforce_eager=bool(reasons)))

    def _with_fewer_sizes(self, config: VllmConfig, ops: RolloutOps) -> VllmConfig:
        """The configuration without the sizes of steps that verify drafts, where these alone cannot be captured."""
        compilation, sizes = config.compilation, config.compilation.cudagraph_capture_sizes
        plain = tuple(size for size in sizes if size <= config.scheduler.max_num_seqs)
        if compilation.enforce_eager or not plain or plain == sizes:
            return config
        reasons = self.graph_problems(config, ops)
        fewer = replace(config, compilation=replace(compilation, cudagraph_capture_sizes=plain))
        if not reasons or self.graph_problems(fewer, ops):
            return config
        logger.warning("steps of more than %d rows run eagerly: %s", plain[-1], "; ".join(reasons))
        return fewer


def table_problems(config: VllmConfig, ops: RolloutOps) -> list[str]:
    """The `Platform.graph_problems` of a device that captures graphs: what its steps run and cannot be captured."""
    entries = [name for name in ops.not_capturable if name != "exchanged_experts"]
    problems = []
    if entries:
        problems.append(
            f"{', '.join(entries)} of the op table cannot be captured as a graph; set rollout_ops to a table written "
            "for the device"
        )
    return problems + exchange_problems(config, ops)


def exchange_problems(config: VllmConfig, ops: RolloutOps) -> list[str]:
    """Those of `table_problems` that come from how tokens reach experts of other ranks."""
    parallel = config.parallel
    is_exchanged = parallel.enable_expert_parallel and parallel.expert_exchange == "dispatch"
    if not is_exchanged or "exchanged_experts" not in ops.not_capturable:
        return []
    return ["what expert_exchange=dispatch sends depends on values; all_gather can be captured"]
