"""How the ops of a CPU call their kernels: the way of multiplying, the memory of results, the launch."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.ops.cpu.build import kernels
from vllm.ops.cpu.graph import is_capturing, launch
from vllm.ops.cpu.memory import LEAST_BYTES, StepMemory

Launch = Callable[..., None]

_FLOAT32 = 0  # the kernels' mode for float32 tensors


class Bfloat16Products(IntEnum):
    """How the kernels multiply bfloat16. Each way gives a row the same bits in any batch; they round differently."""

    WIDENED = 1  # in float32 registers: any processor
    DOT = 2  # by the instructions for pairs (AVX512-BF16)
    TILES = 3  # by those for tiles of 16 rows by 16 columns (AMX)


class KernelCalls:
    """Calls kernels with one way of multiplying bfloat16.

    launch: runs a kernel, given its name and its arguments; the planner's does not run it.
    """

    def __init__(self, products: Bfloat16Products, launch: Launch = launch) -> None:
        self._launch = launch
        self.uses_tiles = products is Bfloat16Products.TILES
        self._modes = {torch.float32: _FLOAT32, torch.bfloat16: int(products)}
        self._memory = StepMemory()
        kernels()  # built now, not in the first step

    def run(self, name: str, *arguments: Any) -> None:
        """Run the kernel `name`, which gets the addresses of tensors and arrays."""
        self._launch(name, *[one if type(one) in (int, float) else _address(one) for one in arguments])

    def takes_rows(self, dtype: torch.dtype) -> bool:
        """Whether weights of this dtype are [..., out, in] in memory, as in checkpoints, and not [..., in, out]."""
        return self.uses_tiles and dtype is torch.bfloat16

    def takes_panels(self, dtype: torch.dtype) -> bool:
        """Whether large weights of this dtype may be panels of pairs (panels.py)."""
        return not self.uses_tiles and dtype is torch.bfloat16

    def mode(self, first: Tensor, *others: Tensor) -> int:
        """The kernels' mode for tensors of one dtype."""
        for other in others:
            assert other.dtype is first.dtype, (first.dtype, other.dtype)
        return self._modes[first.dtype]

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Uninitialised memory for a result with the dtype and the device of `like`."""
        if self._is_for_step(prod(shape), like.dtype):
            return self._memory.empty(*shape, dtype=like.dtype)
        return like.new_empty(shape)

    def converted(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in `dtype`, itself where it has it."""
        if x.dtype is dtype or not self._is_for_step(prod(x.shape), dtype):
            return x.to(dtype)
        return self._memory.empty(*x.shape, dtype=dtype).copy_(x)

    def _is_for_step(self, num_values: int, dtype: torch.dtype) -> bool:
        """Whether a result is large, and nobody keeps account of allocations: neither a plan nor a graph capture."""
        return num_values * dtype.itemsize >= LEAST_BYTES and self._launch is launch and not is_capturing()


def _address(memory: Tensor | np.ndarray | None) -> int:
    if memory is None:
        return 0
    return memory.data_ptr() if isinstance(memory, Tensor) else memory.ctypes.data
