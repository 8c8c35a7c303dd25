"""NVIDIA devices through torch.cuda."""

from __future__ import annotations

import torch

from vllm.platforms.interface import DeviceMemory, Platform


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

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()
