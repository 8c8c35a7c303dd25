"""Ascend devices through torch_npu."""

from __future__ import annotations

import torch

from vllm.platforms.interface import DeviceMemory, Platform

# Page sizes of the paged attention kernel.
BLOCK_STEP, MAX_BLOCK = 16, 512


class NPUPlatform(Platform):
    """torch_npu with the Ascend ops, hccl between processes."""

    name = "npu"
    dist_backend = "hccl"
    rollout_ops = "vllm_ascend.ops:rollout_ops"
    supported_dtypes = ("bfloat16", "float16")

    def device(self, local_rank: int) -> torch.device:
        import torch_npu

        torch_npu.npu.set_device(local_rank)
        return torch.device("npu", local_rank)

    def memory(self, device: torch.device) -> DeviceMemory:
        import torch_npu

        free, total = torch_npu.npu.mem_get_info(device)
        cached = torch_npu.npu.memory_reserved(device) - torch_npu.npu.memory_allocated(device)
        return DeviceMemory(free + cached, total)

    def empty_cache(self) -> None:
        import torch_npu

        torch_npu.npu.empty_cache()

    def synchronize(self) -> None:
        import torch_npu

        torch_npu.npu.synchronize()

    def config_problems(self, block_size: int, dtype: str) -> list[str]:
        problems = super().config_problems(block_size, dtype)
        if block_size % BLOCK_STEP or not BLOCK_STEP <= block_size <= MAX_BLOCK:
            problems.append(
                f"block_size={block_size} is not supported on npu; use a multiple of {BLOCK_STEP} "
                f"up to {MAX_BLOCK}, best 128"
            )
        return problems
