"""What this processor can do, and which dtypes its products are made in."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Linux's names of the instructions that multiply bfloat16. Without one of them torch multiplies bfloat16 several times
# slower than float32, so the products are made from float32 copies and rounded once.
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products."""
    return not instructions().isdisjoint(_BFLOAT16_INSTRUCTIONS)


@cache
def instructions() -> frozenset[str]:
    """Linux's names of what this processor can do; torch 2.5 has no function for it."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def is_widened(x: Tensor) -> bool:
    """Whether products of x's dtype are made from float32 copies."""
    return x.dtype in (torch.bfloat16, torch.float16) and not multiplies_bfloat16()
