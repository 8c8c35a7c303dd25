"""The host as a device: what a laptop runs on and what the tests use."""

from __future__ import annotations

import ctypes
import os

import torch

from vllm.platforms.interface import DeviceMemory, Platform

KV_CACHE_FRACTION_OF_HOST = 0.1  # the host also holds the trainer, other ranks and everything else
PURGE_ALL_ARENAS = b"arena.4096.purge"


class CpuPlatform(Platform):
    """Plain torch on the host, gloo between processes."""

    name = "cpu"
    dist_backend = "gloo"
    rollout_ops = "vllm.ops.cpu:default_ops"

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def memory(self, device: torch.device) -> DeviceMemory:
        page = os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)

    def empty_cache(self) -> None:
        """Hand free memory back to the host: allocators keep what they think they will need again."""
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc; others have nothing of the kind
            libc.malloc_trim(0)
        if hasattr(libc, "mallctl"):  # jemalloc in front of it
            libc.mallctl(PURGE_ALL_ARENAS, None, None, None, 0)

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        """A fixed share of the host, so that every rank and every restart gets the same number of blocks."""
        return int(self.memory(device).total_bytes * KV_CACHE_FRACTION_OF_HOST * utilization)
