"""Ascend devices through torch_npu."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch

from vllm.platforms.interface import DeviceMemory, GraphPool, Platform, table_problems
from vllm_ascend._compat import unmap_cached_memory
from vllm_ascend.ops.exchanged_experts import capture_problem, environment_buffer_mib, exchange_problem
from vllm_ascend.ops.mla_decode import BLOCK_STEP, MAX_BLOCK, head_problem
from vllm_ascend.versions import graph_problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.ops.contract import RolloutOps

# Communication buffers of the engine's groups in MiB: for TP a prefill's activations, for EP those of all replicas, for
# DP a few numbers and rebalanced blocks. The exchange's kernels read HCCL_BUFFSIZE alone.
BUFFER_MIB = {"tp": 64, "ep": 200, "dp": 32}
BUFFERS_OF_A_COMMUNICATOR = 2  # one to send from, one to receive into
VECTOR_CORES = 3  # of hccl_op_expansion_mode: 1 is the host, 2 the control processor
VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
# Settings of torch_npu that graphs exclude: a second level of the launch queue, and waiting for every launch.
WRONG_FOR_GRAPHS = {"TASK_QUEUE_ENABLE": "2", "ASCEND_LAUNCH_BLOCKING": "1"}


class NPUPlatform(Platform):
    """torch_npu with the Ascend ops, hccl between processes. float32 is for debugging: it decodes without the paged
    kernel.
    """

    name = "npu"
    dist_backend = "hccl"
    rollout_ops = "vllm_ascend.ops:rollout_ops"
    supported_dtypes = ("bfloat16", "float16", "float32")
    supported_kv_layouts = ("nd", "nz")
    holds_fp8 = False
    keeps_graphs_over_sleep = True

    def device(self, local_rank: int) -> torch.device:
        """See ``Platform.device``; ValueError when there is no torch_npu or no such device."""
        count = self.num_devices()
        if local_rank >= count:
            raise ValueError(
                f"device=npu: this process is number {local_rank} of its host, but {count} devices are visible "
                f"({_visible()}); start one process per device or show it more of them (npu-smi info lists all)"
            )
        import torch_npu

        torch_npu.npu.set_device(local_rank)
        return torch.device("npu", local_rank)

    def num_devices(self) -> int:
        """How many devices ASCEND_RT_VISIBLE_DEVICES lets this process see; ValueError when none."""
        if importlib.util.find_spec("torch_npu") is None:
            raise ValueError(
                "device=npu: torch_npu is not installed; install requirements/npu.txt beside CANN, or set device=cpu"
            )
        import torch_npu

        count: int = torch_npu.npu.device_count()
        if count == 0:
            raise ValueError(
                f"device=npu: no Ascend device is visible ({_visible()}); check npu-smi info, that the container was "
                "given /dev/davinci*, and that CANN's set_env.sh was sourced"
            )
        return count

    def memory(self, device: torch.device) -> DeviceMemory:
        import torch_npu

        free, total = torch_npu.npu.mem_get_info(device)
        cached = torch_npu.npu.memory_reserved(device) - torch_npu.npu.memory_allocated(device)
        return DeviceMemory(free + cached, total)

    def group_options(self, group: str) -> Any:
        """See ``Platform.group_options``."""
        config = {"hccl_buffer_size": BUFFER_MIB[group]} if group in BUFFER_MIB else {}
        # NPU-ADAPTATION(hccl-aiv-by-group): expanding collectives on the vector cores makes decoding's small messages
        # quick, and several such communicators at a time are undefined, as with HCCL_OP_EXPANSION_MODE=AIV for a whole
        # job; groups whose collectives follow one another ask for it; drop when HCCL chooses it by message size.
        if group in ("tp", "ep"):
            config["hccl_op_expansion_mode"] = VECTOR_CORES
        # NPU-ADAPTATION END
        return _hccl_options(config)

    def group_buffer_bytes(self, group: str) -> int:
        """See ``Platform.group_buffer_bytes``."""
        return BUFFERS_OF_A_COMMUNICATOR * BUFFER_MIB.get(group, environment_buffer_mib()) << 20

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        """See ``Platform.kv_cache_budget_bytes``.

        Only the driver's count is whole: physical memory that ``empty_cache`` has unmapped is in none of torch_npu's.
        """
        import torch_npu

        torch_npu.npu.empty_cache()
        return super().kv_cache_budget_bytes(device, utilization)

    def empty_cache(self) -> None:
        import torch_npu

        empty = torch_npu.npu.empty_cache
        # NPU-ADAPTATION(virtual-address-cache): with expandable segments, empty_cache hands tens of GB to the driver
        # for the next phase to take them back, 4 s each time on a die; unmapping is enough: the allocator keeps the
        # physical memory and maps it where the next phase needs it; drop when empty_cache does that.
        if _has_expandable_segments():
            empty = unmap_cached_memory
        # NPU-ADAPTATION END
        empty()

    def synchronize(self) -> None:
        import torch_npu

        torch_npu.npu.synchronize()

    def graph_pool(self) -> GraphPool:
        from vllm_ascend.compilation.acl_graph import AclGraphPool

        return AclGraphPool()

    def default_capture_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """One size: each takes streams, of which a device has few, and a capture's time after every sleep."""
        return (max_num_seqs,)

    def graph_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        problems = [*table_problems(config, ops), capture_problem(config), *self.host_graph_problems()]
        return [problem for problem in problems if problem is not None]

    def host_graph_problems(self) -> list[str | None]:
        """Return what of this machine's software and environment excludes graphs."""
        is_wrong = ((name, value) for name, value in WRONG_FOR_GRAPHS.items() if os.environ.get(name) == value)
        return [
            graph_problem(),
            *(f"graphs cannot be captured with {name}={value}; leave that variable out" for name, value in is_wrong),
        ]

    def config_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        problems = super().config_problems(config, ops)
        block_size = config.cache.block_size
        if block_size % BLOCK_STEP or not BLOCK_STEP <= block_size <= MAX_BLOCK:
            problems.append(
                f"block_size={block_size} is not supported on npu; use a multiple of {BLOCK_STEP} "
                f"up to {MAX_BLOCK}, best 128"
            )
        heads = config.model.hf.num_attention_heads // config.parallel.tensor_parallel_size
        more = (head_problem(heads, config.model.hf, config.model.dtype), exchange_problem(config))
        return problems + [problem for problem in more if problem is not None]


def _hccl_options(config: dict[str, int]) -> Any:
    """Options of ``ProcessGroupHCCL``, torch_npu's documented way to settings of one group."""
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = config
    return options


def _has_expandable_segments() -> bool:
    """Whether they are on; torch_npu refuses ``empty_virt_addr_cache`` without them, and has no function to ask."""
    return "expandable_segments:true" in os.environ.get("PYTORCH_NPU_ALLOC_CONF", "").lower()


def _visible() -> str:
    value = os.environ.get(VISIBLE_DEVICES)
    return f"{VISIBLE_DEVICES} is not set" if value is None else f"{VISIBLE_DEVICES}={value!r}"
