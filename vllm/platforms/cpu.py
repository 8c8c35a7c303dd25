"""The host as a device: what a laptop runs on and what the tests use."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm.ops.cpu import memory
from vllm.ops.cpu.graph import CpuGraphPool
from vllm.platforms.interface import DeviceMemory, GraphPool, Platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.ops.contract import RolloutOps

KV_CACHE_FRACTION_OF_HOST = 0.1  # the host also holds the trainer, other ranks and everything else
LARGE_PAGE_BYTES = 2 << 20
PURGE_ALL_ARENAS = b"arena.4096.purge"


class CpuPlatform(Platform):
    """Plain torch on the host, gloo between processes."""

    name = "cpu"
    dist_backend = "gloo"
    rollout_ops = "vllm.ops.cpu:default_ops"
    captured_logits_bytes = 4 << 20  # for larger products the calls that a graph saves make no difference

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def memory(self, device: torch.device) -> DeviceMemory:
        page = os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)

    def empty_cache(self) -> None:
        """Return free memory to the host, which allocators keep for later."""
        memory.release_all()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc alone has it
            libc.malloc_trim(0)
        if hasattr(libc, "mallctl"):  # jemalloc in front of it
            libc.mallctl(PURGE_ALL_ARENAS, None, None, None, 0)

    def prefer_large_pages(self, tensor: Tensor) -> None:
        """Advise the system; without transparent large pages nothing changes."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        storage = tensor.untyped_storage()
        first = -(-storage.data_ptr() // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        length = (storage.data_ptr() + storage.nbytes() - first) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
        if length > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        """Return a fixed share of the host, so that every rank and every restart gets the same number of blocks."""
        return int(self.memory(device).total_bytes * KV_CACHE_FRACTION_OF_HOST * utilization)

    def graph_pool(self) -> GraphPool:
        return CpuGraphPool()

    def graph_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        parallel = config.parallel
        reasons = []
        if "mla_decode" in ops.not_capturable:
            reasons.append("the op table is not that of the CPU kernels (vllm.ops.cpu), which a C++ compiler builds")
        if parallel.tensor_parallel_size > 1 or parallel.steps_in_lockstep:
            reasons.append("calls between processes cannot be captured")
        if config.model.quantization == "fp8":
            reasons.append("weights held in FP8 would be kept dequantised")
        return [f"on a CPU {reason}" for reason in reasons]
