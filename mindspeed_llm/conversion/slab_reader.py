"""What writers write: the bytes of a stored tensor, assembled from a source in slabs of whole rows of bounded size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_formats.fp8 import BLOCK, FP8_DTYPE, quantize
from hf_formats.ranges import shape_of
from mindspeed_llm.conversion.kernels import Kernels
from mindspeed_llm.conversion.writer import ByteSlabs, StoredTensor
from mindspeed_llm.weight_plan import TensorPlan, slice_rows
from mindspeed_llm.weight_source import WeightSource, fill, plain_dtype

_CACHED_BYTES = 4 << 20  # a slab is read, summed and written while it is in the processor's last cache
_QUANTISING_BYTES = 16  # per element, for the fp32 values, their scaled form and the masks


class SlabReader:
    """Makes the slabs of one file's tensors, in the file's order; holds one at a time, of at most ``max_bytes`` with
    all that it is made of, or one row (of grouped experts: one expert; of a quantised tensor: 128 rows)."""

    def __init__(self, source: WeightSource, max_bytes: int, kernels: Kernels, on_bytes: Callable[[int], None]) -> None:
        self._source = source
        self._kernels = kernels
        self._max_bytes = max_bytes
        self._on_bytes = on_bytes
        self._scales: list[Tensor] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)  # new memory for every slab would cost a fault on every page

    def __call__(self, tensor: StoredTensor) -> ByteSlabs:
        """The slabs of ``tensor``, made one at a time as they are iterated."""
        return ByteSlabs(self._slabs(tensor), self._kernels.crc32, self._on_bytes)

    def _slabs(self, tensor: StoredTensor) -> Iterator[Tensor]:
        first = tensor.content.shards[0]
        is_kept = self._source.dtype(first.hf_name) == tensor.dtype == FP8_DTYPE
        if tensor.form == "fp8_scale" and self._source.dtype(first.hf_name) == FP8_DTYPE:
            yield self._source.read(tensor.name, tuple((0, size) for size in tensor.shape))
            return
        if tensor.form == "fp8_scale":
            assert self._scales, f"{tensor.name} does not follow its weight"
            yield torch.cat(self._scales)
            return
        self._scales = []
        rows, step = tensor.content.shape[0], _cost(tensor, self._source).rows_within(self._max_bytes)
        for start in range(0, rows, step):
            part = slice_rows(tensor.content, start, min(start + step, rows))
            if tensor.form == "fp8" and not is_kept:
                dtype = plain_dtype(self._source, part.shards[0].hf_name)
                quantised, scales, _ = quantize(self._assemble(part, dtype))
                self._scales.append(scales)
                yield quantised
            else:
                yield self._assemble(part, tensor.dtype)

    def _assemble(self, part: TensorPlan, dtype: torch.dtype) -> Tensor:
        """``part`` in the buffer; a view of the source where that holds just these bytes."""
        if _is_view(part, dtype, self._source):
            return self._source.read(part.shards[0].hf_name, part.shards[0].ranges).reshape(part.shape)
        num_bytes = part.num_elements * dtype.itemsize
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        local = self._buffer[:num_bytes].view(dtype).view(part.shape)
        fill(local, part, self._source, self._kernels.copy)
        return local


def in_flight_bytes(tensor: StoredTensor, source: WeightSource, max_bytes: int) -> int:
    """Most memory that ``SlabReader`` takes for ``tensor``."""
    if tensor.form == "fp8_scale":
        return 2 * tensor.num_bytes
    cost = _cost(tensor, source)
    return cost.fixed_bytes + min(tensor.content.shape[0], cost.rows_within(max_bytes)) * cost.row_bytes


def _is_view(part: TensorPlan, dtype: torch.dtype, source: WeightSource) -> bool:
    first = part.shards[0]
    return len(part.shards) == 1 and not first.transpose and source.dtype(first.hf_name) == dtype


@dataclass(frozen=True)
class _Cost:
    """Memory of a slab: of each row (dim 0) with what it is made of, and what does not grow with rows."""

    row_bytes: int
    fixed_bytes: int
    row_multiple: int

    def rows_within(self, max_bytes: int) -> int:
        within = (min(max_bytes, _CACHED_BYTES) - self.fixed_bytes) // max(1, self.row_bytes)
        return max(1, within // self.row_multiple) * self.row_multiple


def _cost(tensor: StoredTensor, source: WeightSource) -> _Cost:
    content, first = tensor.content, tensor.content.shards[0]
    elements = math.prod(content.shape[1:])
    stored = source.dtype(first.hf_name).itemsize
    if tensor.form == "fp8" and source.dtype(first.hf_name) != FP8_DTYPE:
        return _Cost(elements * (_QUANTISING_BYTES + 2 * stored), 0, BLOCK)
    made = elements * tensor.dtype.itemsize
    if _is_view(content, tensor.dtype, source):
        return _Cost(made, 0, 1)
    if first.transpose:  # an expert's gate or up, or its down, is read at a time
        return _Cost(made, math.prod(shape_of(first.ranges)) * stored, 1)
    return _Cost(made + elements * stored, 0, 1)
