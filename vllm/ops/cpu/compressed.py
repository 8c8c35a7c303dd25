"""Matrices that lie coded in memory: bfloat16, bit for bit, in 77% of the bytes (csrc/coded.h).

A decode step of a large model takes the time of reading its weights; a code that is widened on its way into the
processor's tiles is read sooner. Values are never changed: a matrix that the code cannot give back exactly, one whose
neighbouring values differ by more than 2^16 in too many places, stays as it is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from vllm.ops.cpu.build import kernels

CODED_DTYPE = torch.bfloat16
_LEAST_VALUES = 1 << 19  # of a matrix: smaller ones stay in the caches, where widening costs more than reading


def is_worth_coding(rows: int, columns: int, is_turned: bool = False) -> bool:
    """Whether matrices of this size can be coded, and are read sooner so; is_turned: others [columns, rows] as well."""
    fits = _coded_bytes(rows, columns) > 0 and (not is_turned or _coded_bytes(columns, rows) > 0)
    return rows * columns >= _LEAST_VALUES and fits


def _coded_bytes(rows: int, columns: int) -> int:
    return int(kernels().cpu_coded_bytes(rows, columns))


class CodedMatrices(nn.Module):
    """bfloat16 [E, parts, R, C] on the CPU: some matrices of each of E experts, or of one layer, coded one by one."""

    def __init__(self, experts: int, parts: int, rows: int, columns: int) -> None:
        """R must be a multiple of 16, C of 32."""
        super().__init__()
        size = _coded_bytes(rows, columns)
        assert size > 0, (rows, columns)
        self.experts, self.parts, self.rows, self.columns = experts, parts, rows, columns
        self.code = nn.Parameter(torch.empty(experts * parts, size, dtype=torch.uint8), requires_grad=False)
        self.uncoded: dict[int, Tensor] = {}  # bf16 [R, C] of those that the code does not give back
        self._places = np.zeros((experts, parts), dtype=np.int64)
        self._placed_at = -1  # the address of the codes that places were made of

    def __len__(self) -> int:
        return self.experts

    def places(self) -> np.ndarray:
        """int64 [E, parts], for kernels: the address of each code, or that of an uncoded matrix plus 1.

        Always the same memory, which recorded calls read anew.
        """
        address = self.code.data_ptr()
        if self.uncoded or address != self._placed_at:  # after a sleep all is elsewhere
            for index in range(self.experts * self.parts):
                self._place(index)
            self._placed_at = address
        return self._places

    def matrix(self, expert: int, part: int) -> CodedMatrix:
        """One of the matrices."""
        return CodedMatrix(self, expert * self.parts + part)

    def store(self, index: int, values_RC: Tensor) -> None:
        """Hold other values, bfloat16; their memory is not kept."""
        values_RC = values_RC.contiguous()
        assert values_RC.dtype is CODED_DTYPE and values_RC.shape == (self.rows, self.columns), values_RC.shape
        code, shape = self.code[index], (self.rows, self.columns)
        if kernels().cpu_encode(values_RC.data_ptr(), self.columns, *shape, code.data_ptr()):
            self.uncoded.pop(index, None)
        else:
            self.uncoded[index] = values_RC.clone()
        self._place(index)

    def values(self, index: int) -> Tensor:
        """A copy, bfloat16 [R, C]."""
        if index in self.uncoded:
            return self.uncoded[index].clone()
        values_RC = torch.empty(self.rows, self.columns, dtype=CODED_DTYPE, device=self.code.device)
        if not self.code.is_meta:
            kernels().cpu_decode(self.code[index].data_ptr(), self.rows, self.columns, values_RC.data_ptr())
        return values_RC

    def _place(self, index: int) -> None:
        uncoded = self.uncoded.get(index)
        place = self.code.data_ptr() + index * self.code.shape[1] if uncoded is None else uncoded.data_ptr() + 1
        self._places[divmod(index, self.parts)] = place


class CodedMatrix:
    """One of `CodedMatrices`, with a tensor's properties and its values for a copy."""

    def __init__(self, matrices: CodedMatrices, index: int) -> None:
        self._matrices, self._index = matrices, index
        self.shape = torch.Size((matrices.rows, matrices.columns))
        self.dtype = CODED_DTYPE

    @property
    def device(self) -> torch.device:
        return self._matrices.code.device

    def numel(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return len(self.shape)

    def store(self, values_RC: Tensor) -> None:
        """See `CodedMatrices.store`."""
        self._matrices.store(self._index, values_RC)

    def values(self) -> Tensor:
        """See `CodedMatrices.values`."""
        return self._matrices.values(self._index)
