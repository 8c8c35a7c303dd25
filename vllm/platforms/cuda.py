"""NVIDIA devices through torch.cuda."""

from __future__ import annotations

import torch

from vllm.platforms.interface import DeviceMemory, Platform

ACTIVATION_FRACTION = 0.1  # of the allowed memory, left for activations and communication buffers


class CudaPlatform(Platform):
    """torch.cuda with the reference ops, nccl between processes."""

    name = "cuda"
    dist_backend = "nccl"
    rollout_ops = "vllm.ops.reference:rollout_ops"
    supported_dtypes = ("float32", "bfloat16", "float16")

    def device(self, local_rank: int) -> torch.device:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device

    def memory(self, device: torch.device) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return DeviceMemory(free + cached, total)

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        memory = self.memory(device)
        allowed = int(memory.total_bytes * utilization)
        used = memory.total_bytes - memory.free_bytes
        return max(0, allowed - used - int(allowed * ACTIVATION_FRACTION))

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()
