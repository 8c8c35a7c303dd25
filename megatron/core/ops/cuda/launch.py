"""Sizes of Triton programs, and the dtypes that the kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_dtype(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take tensors of this dtype, which must be one."""
    return x.dtype in DTYPES and all(other.dtype == x.dtype for other in others)


def cdiv(size: int, part: int) -> int:
    return -(-size // part)


def block_of(size: int, largest: int | None = None) -> int:
    """The power of two that holds ``size`` elements, at most ``largest`` (also a power of two)."""
    block = 1 << (size - 1).bit_length()
    return block if largest is None else min(block, largest)


def num_warps(size: int) -> int:
    """Warps for a program that keeps a row of ``size`` elements in registers."""
    return 4 if size <= 2048 else 8 if size <= 4096 else 16
