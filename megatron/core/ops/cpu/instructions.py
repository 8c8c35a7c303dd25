"""What this processor can do, and which dtypes its products are made in."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hf_formats.cpu_kernels import instructions

# Linux's names of the instructions that multiply bfloat16. Without one of them torch multiplies bfloat16 several times
# slower than float32, so the products are made from float32 copies and rounded once.
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products."""
    return not instructions().isdisjoint(_BFLOAT16_INSTRUCTIONS)


@cache
def multiplies_tiles() -> bool:
    """Whether this CPU multiplies whole tiles of bfloat16 (AMX)."""
    return "amx_bf16" in instructions()


def is_widened(x: Tensor) -> bool:
    """Whether products of x's dtype are made from float32 copies."""
    return x.dtype in (torch.bfloat16, torch.float16) and not multiplies_bfloat16()
