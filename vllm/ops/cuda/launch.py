"""How the ops of this table run their Triton kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Launch = Callable[..., None]

_H100_PROCESSORS = 132  # assumed where there is no device to ask: in the interpreter and in plans


def launch(name: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `grid` programs of the kernel `name` of vllm/ops/cuda/kernels.

    Args:
        arguments: tensors and numbers, in the kernel's order.
        options: the kernel's constants, and triton's num_warps and num_stages.
    """
    if 0 not in grid:
        find_kernel(name)[grid](*arguments, **options)


@cache
def find_kernel(name: str) -> Any:
    """Return a kernel; RuntimeError where nothing can run it."""
    from vllm.ops.cuda import kernels

    if not torch.cuda.is_available() and not kernels.is_interpreted:
        raise RuntimeError(
            "the kernels of vllm.ops.cuda need an NVIDIA device, and torch finds none; TRITON_INTERPRET=1 in the "
            "environment runs them on a CPU, for tests"
        )
    return kernels.kernel_called(name)


def check_triton() -> None:
    """Raise a ValueError when triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "rollout_ops='vllm.ops.cuda:rollout_ops' needs triton, which is not installed: install the one that this "
            "torch names (torch for CUDA brings it along), or set rollout_ops='vllm.ops.reference:rollout_ops'"
        )


@cache
def num_processors(device: torch.device) -> int:
    """Return how many programs of a full size the device runs at a time."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _H100_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def tile_for(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least both."""
    return max(least, 1 << (size - 1).bit_length())
