"""NVIDIA devices through torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm.ops.contract import RolloutOps
from vllm.ops.cuda.exchange import capture_problems
from vllm.platforms.interface import CapturedGraph, DeviceMemory, GraphPool, Platform, table_problems

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CudaGraphPool(GraphPool):
    """Graphs in one private pool of torch's allocator."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads (nccl's watchdog, a recipe's heartbeat) go on asking about their own work.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return CapturedGraph(output, graph.replay, graph.reset)


class CudaPlatform(Platform):
    """torch.cuda with Triton kernels, nccl between processes."""

    name = "cuda"
    dist_backend = "nccl"
    rollout_ops = "vllm.ops.cuda:rollout_ops"
    supported_dtypes = ("float32", "bfloat16", "float16")

    def device(self, local_rank: int) -> torch.device:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device

    def num_devices(self) -> int:
        return torch.cuda.device_count()

    def device_uuid(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def memory(self, device: torch.device) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return DeviceMemory(free + cached, total)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def graph_pool(self) -> GraphPool:
        return CudaGraphPool()

    def graph_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        problems = table_problems(config, ops)
        return problems if "exchanged_experts" in ops.not_capturable else problems + capture_problems(config)
