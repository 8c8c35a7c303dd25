"""Compressed bfloat16 weights: the same values bit for bit in 77% of the bytes (csrc/compressed.h).

A decode step of a large model takes as long as reading its weights; the kernels decompress them on the way into the
processor's matrix tiles. A matrix that the format cannot hold exactly, because neighbouring values differ by more than
2^16 in too many places, stays uncompressed. Letters: R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vllm.ops.cpu.build import kernels
from vllm.ops.weights import PackedWeight

COMPRESSED_DTYPE = torch.bfloat16
_LEAST_VALUES = 1 << 19  # a smaller matrix stays in the caches, where decompressing costs more than reading


def is_worth_compressing(rows: int, columns: int, *, both_ways: bool = False) -> bool:
    """Whether matrices of this size can be compressed and are then read faster; both_ways: [columns, rows] as well."""
    fits = _compressed_bytes(rows, columns) > 0 and (not both_ways or _compressed_bytes(columns, rows) > 0)
    return rows * columns >= _LEAST_VALUES and fits


def _compressed_bytes(rows: int, columns: int) -> int:
    return int(kernels().cpu_compressed_bytes(rows, columns))


class CompressedWeight(PackedWeight):
    """bfloat16 matrices on the CPU, compressed one by one. R must be a multiple of 16, C of 32."""

    def __init__(self, num_experts: int, num_parts: int, rows: int, columns: int) -> None:
        super().__init__(num_experts, num_parts, rows, columns, COMPRESSED_DTYPE)
        size = _compressed_bytes(rows, columns)
        assert size > 0, (rows, columns)
        self.memory = nn.Parameter(torch.empty(num_experts * num_parts, size, dtype=torch.uint8), requires_grad=False)
        self.uncompressed: dict[int, Tensor] = {}  # bf16 [R, C], the matrices that the format cannot hold
        self._addresses = np.zeros((num_experts, num_parts), dtype=np.int64)
        self._memory_address = -1  # where `memory` was when the addresses were computed

    @property
    def loose_tensors(self) -> Sequence[Tensor]:
        return tuple(self.uncompressed.values())

    def addresses(self) -> np.ndarray:
        """int64 [experts, parts], for kernels: the address of a compressed matrix, or of an uncompressed one plus 1.

        The array is always the same memory: captured calls read it anew.
        """
        address = self.memory.data_ptr()
        if self.uncompressed or address != self._memory_address:  # a sleep moves everything
            for index in range(self.num_experts * self.num_parts):
                self._update_address(index)
            self._memory_address = address
        return self._addresses

    def write(self, index: int, values_RC: Tensor) -> None:
        values_RC = values_RC.contiguous()
        assert values_RC.dtype is COMPRESSED_DTYPE and values_RC.shape == (self.rows, self.columns), values_RC.shape
        target, shape = self.memory[index], (self.rows, self.columns)
        if kernels().cpu_compress(values_RC.data_ptr(), self.columns, *shape, target.data_ptr()):
            self.uncompressed.pop(index, None)
        else:
            self.uncompressed[index] = values_RC.clone()
        self._update_address(index)

    def read(self, index: int) -> Tensor:
        if index in self.uncompressed:
            return self.uncompressed[index].clone()
        values_RC = torch.empty(self.rows, self.columns, dtype=COMPRESSED_DTYPE, device=self.memory.device)
        if not self.memory.is_meta:
            kernels().cpu_decompress(self.memory[index].data_ptr(), self.rows, self.columns, values_RC.data_ptr())
        return values_RC

    def _update_address(self, index: int) -> None:
        uncompressed = self.uncompressed.get(index)
        compressed = self.memory.data_ptr() + index * self.memory.shape[1]
        address = compressed if uncompressed is None else uncompressed.data_ptr() + 1
        self._addresses[divmod(index, self.num_parts)] = address
