"""What torch_npu's versions call differently."""

from __future__ import annotations


def unmap_cached_memory() -> None:
    """Unmap the allocator's unused memory and keep it with the process; torch_npu 2.5.1 can only give it back."""
    import torch_npu

    getattr(torch_npu.npu, "empty_virt_addr_cache", torch_npu.npu.empty_cache)()
