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
from vllm.platforms.interface import DeviceMemory, GraphPool, Platform, exchange_problems

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
    has_reduce_scatter = False
    rollout_ops = "vllm.ops.cpu:default_ops"
    captured_logits_bytes = 4 << 20  # for larger products the calls that a graph saves make no difference
    keeps_graphs_over_sleep = True

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def device_uuid(self, device: torch.device) -> str:
        return "cpu"

    def memory(self, device: torch.device) -> DeviceMemory:
        page = os.sysconf("SC_PAGE_SIZE")
        return DeviceMemory(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)

    def empty_cache(self) -> None:
        """Return free memory to the host, but for what an allocator's variables keep (``MALLOC_TRIM_THRESHOLD_`` of
        glibc, ``dirty_decay_ms:-1`` in jemalloc's ``MALLOC_CONF``): in a process that also trains, the next phase would
        take it again, page by page.
        """
        memory.release_all()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim") and not os.environ.get("MALLOC_TRIM_THRESHOLD_"):  # glibc alone has it
            libc.malloc_trim(0)
        keeps_pages = "dirty_decay_ms:-1" in os.environ.get("MALLOC_CONF", "")
        if hasattr(libc, "mallctl") and not keeps_pages:  # jemalloc in front of it
            libc.mallctl(PURGE_ALL_ARENAS, None, None, None, 0)

    def free(self, tensor: Tensor, keeps_address: bool) -> int:
        """See ``Platform.free``: the system takes the pages, the address stays and reads as zeros."""
        if not keeps_address:
            return super().free(tensor, keeps_address)
        storage = tensor.untyped_storage()
        values = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        first, length = _whole_pages(storage, mmap.PAGESIZE)
        start = first - storage.data_ptr()
        values[:start] = 0
        values[start + length :] = 0
        if length > 0 and ctypes.CDLL(None, use_errno=True).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED
        ):
            raise OSError(ctypes.get_errno(), "madvise: the system does not take back the memory of a sleeping engine")
        return 0

    def allocate(self, tensor: Tensor, zeroed: bool) -> None:
        if tensor.untyped_storage().nbytes() == 0:
            super().allocate(tensor, zeroed)

    def prefer_large_pages(self, tensor: Tensor) -> None:
        """Advise the system; without transparent large pages nothing changes."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        first, length = _whole_pages(tensor.untyped_storage(), LARGE_PAGE_BYTES)
        if length > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        """Return a fixed share of the host, so that every rank and every restart gets the same number of blocks."""
        return int(self.memory(device).total_bytes * KV_CACHE_FRACTION_OF_HOST * utilization)

    def default_capture_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """Multiples of 16 from 16 on: padding is computed, and a capture costs no step of its own."""
        sizes = (1, 2, 4, 8, *range(16, max_num_seqs, 16))
        return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)

    def graph_pool(self) -> GraphPool:
        return CpuGraphPool()

    def graph_problems(self, config: VllmConfig, ops: RolloutOps) -> list[str]:
        reasons = []
        is_interpreted = getattr(ops.mla_decode, "__module__", "").startswith("vllm.ops.cuda")
        if "mla_decode" in ops.not_capturable or is_interpreted:
            reasons.append("the op table is not that of the CPU kernels (vllm.ops.cpu), which a C++ compiler builds")
        reasons += exchange_problems(config, ops)
        if config.model.quantization == "fp8":
            reasons.append("weights held in FP8 would be kept dequantised")
        return [f"on a CPU {reason}" for reason in reasons]


def _whole_pages(storage: torch.UntypedStorage, page_bytes: int) -> tuple[int, int]:
    """Return the address and the bytes of the pages that lie in the storage as a whole; no bytes where none does."""
    first = -(-storage.data_ptr() // page_bytes) * page_bytes
    return first, max(0, (storage.data_ptr() + storage.nbytes() - first) // page_bytes * page_bytes)
