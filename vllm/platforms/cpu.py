"""The host as a device: what a laptop runs on and what the tests use."""

from __future__ import annotations

import os

import torch

from vllm.platforms.interface import DeviceMemory, Platform

KV_CACHE_FRACTION_OF_HOST = 0.1  # the host also holds the trainer, other ranks and everything else


class CpuPlatform(Platform):
    """Plain torch on the host, gloo between processes."""

    name = "cpu"
    dist_backend = "gloo"
    rollout_ops = "vllm.ops.reference:rollout_ops"

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def memory(self, device: torch.device) -> DeviceMemory:
        page = os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        """A fixed share of the host, so that every rank and every restart gets the same number of blocks."""
        return int(self.memory(device).total_bytes * KV_CACHE_FRACTION_OF_HOST * utilization)
