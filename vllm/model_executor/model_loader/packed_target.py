"""Targets in the weights that an op table made: in a tensor, or a whole matrix of a packed weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_formats.fp8 import Fp8Weight, dequantize
from vllm.model_executor.model_loader import weight_target
from vllm.model_executor.model_loader.weight_target import StoredSlice, WeightTarget
from vllm.ops.weights import PackedMatrix, PackedWeight, Weight


@dataclass(frozen=True)
class PackedTarget(WeightTarget):
    """`matrix` holds hf_tensor[source]; `parameter` is the memory of the packed weight that it belongs to."""

    matrix: PackedMatrix | None = None

    def store(self, name: str, weight: weight_target.Weight) -> None:
        assert self.matrix is not None, name
        if isinstance(weight, Fp8Weight):
            values = dequantize(weight.cut(name, *self.ranges()), self.matrix.dtype)
        else:
            values = weight[self.source]
        self.matrix.write(values.to(self.matrix.device, self.matrix.dtype))

    def held(self, name: str) -> Iterator[StoredSlice]:
        assert self.matrix is not None, name
        starts = tuple(start for start, _ in self.ranges())
        yield StoredSlice(name, self.hf_shape, self.matrix.dtype, self.matrix, starts)


def target_of(
    weight: Weight,
    hf_shape: tuple[int, ...],
    source: tuple[slice, ...],
    part: int,
    rows: slice,
    expert: int | None = None,
) -> WeightTarget:
    """The place of hf_tensor[source] in a weight: its part number `part`, which is `rows` of it, of `expert` if any."""
    if isinstance(weight, PackedWeight):
        return PackedTarget(hf_shape, weight.memory, source=source, matrix=weight.matrix(expert or 0, part))
    return WeightTarget(hf_shape, weight, (rows,) if expert is None else (expert, rows), source)
