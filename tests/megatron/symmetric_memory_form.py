"""Torch's fused ops of symmetric memory on a CPU, over gloo: torch's own compositions of what they join."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor


@contextmanager
def symmetric_memory_on_cpu() -> Iterator[list[str]]:
    """Give both ops a CPU form; yields a list of the calls."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        composed = getattr(symm_mem, f"_{name}_fallback")

        def form(x: Tensor, *arguments: Any, **named: Any) -> Any:
            assert x.is_contiguous(), "the library would copy it"
            calls.append(name)
            return composed(x, *arguments, **named)

        return form

    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, noted(name), "CPU")
    try:
        yield calls
    finally:
        library._destroy()


@contextmanager
def mapped_memory(is_reachable: bool) -> Iterator[list[str]]:
    """Let memory be mapped between CPU processes, or not; yields the names of the groups that have done so."""
    groups: list[str] = []
    before = symm_mem.empty, symm_mem.rendezvous, torch.cuda.current_device

    def rendezvous(memory: Tensor, group: str) -> None:
        if not is_reachable:
            raise RuntimeError("CUDA driver error: invalid resource handle")
        groups.append(group)

    symm_mem.empty = lambda *size, dtype, device: torch.empty(*size, dtype=dtype)
    symm_mem.rendezvous, torch.cuda.current_device = rendezvous, lambda: 0
    try:
        yield groups
    finally:
        symm_mem.empty, symm_mem.rendezvous, torch.cuda.current_device = before
