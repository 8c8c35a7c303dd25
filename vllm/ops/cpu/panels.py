"""bfloat16 weights in the order in which products of pairs read them (`pack_panel` of csrc/gemm.h).

A decode step reads every weight once: panels of 32 outputs lie one after the other, so that a thread reads memory from
its start to its end, and products of many rows do not pack them first. Letters: R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from vllm.ops.cpu.build import kernels
from vllm.ops.weights import PackedWeight

_PANEL_ROWS = 32
_LEAST_VALUES = 1 << 18  # smaller weights stay in the caches in any order


def is_worth_panels(part_rows: Sequence[int], columns: int, num_experts: int) -> bool:
    """Whether matrices of so many rows consist of whole panels and are large enough to be read from memory."""
    is_whole = columns % 2 == 0 and all(rows % _PANEL_ROWS == 0 for rows in part_rows)
    return is_whole and num_experts * sum(part_rows) * columns >= _LEAST_VALUES


class PanelWeight(PackedWeight):
    """bfloat16 matrices on the CPU, of each expert those with `part_rows` rows one below the other."""

    def __init__(self, num_experts: int, part_rows: Sequence[int], columns: int) -> None:
        super().__init__(num_experts, len(part_rows), sum(part_rows), columns, torch.bfloat16)
        self.part_rows, self._first_rows = list(part_rows), [0, *accumulate(part_rows)][:-1]
        self.memory = nn.Parameter(
            torch.empty(num_experts, self.rows, columns, dtype=torch.bfloat16), requires_grad=False
        )
        rows = np.arange(num_experts, dtype=np.int64)[:, None] * self.rows + np.array(self._first_rows)
        self._offsets = rows * (columns * self.memory.element_size()) + 2
        self._addresses = np.zeros_like(self._offsets)

    def addresses(self) -> np.ndarray:
        """int64 [experts, parts], for kernels: the address of each matrix plus 2.

        The array is always the same memory: captured calls read it anew.
        """
        return np.add(self._offsets, self.memory.data_ptr(), out=self._addresses)

    def rows_of(self, index: int) -> int:
        return self.part_rows[index % self.num_parts]

    def write(self, index: int, values_RC: Tensor) -> None:
        values_RC, target_RC = values_RC.contiguous(), self._matrix(index)
        assert values_RC.dtype is self.dtype and values_RC.shape == target_RC.shape, (values_RC.shape, target_RC.shape)
        if not target_RC.is_meta:
            kernels().cpu_pack_panels(values_RC.data_ptr(), self.columns, *target_RC.shape, target_RC.data_ptr())

    def read(self, index: int) -> Tensor:
        packed_RC = self._matrix(index)
        values_RC = torch.empty_like(packed_RC)
        if not packed_RC.is_meta:
            kernels().cpu_unpack_panels(packed_RC.data_ptr(), *packed_RC.shape, values_RC.data_ptr())
        return values_RC

    def _matrix(self, index: int) -> Tensor:
        expert, part = divmod(index, self.num_parts)
        first = self._first_rows[part]
        return self.memory.data[expert, first : first + self.part_rows[part]]
