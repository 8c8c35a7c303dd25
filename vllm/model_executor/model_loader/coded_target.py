"""Weights that are held coded: whole matrices, each on its way through a tensor of its own size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_formats.fp8 import Fp8Weight, dequantize
from vllm.model_executor.model_loader.weight_target import StoredSlice, Weight, WeightTarget
from vllm.ops.cpu.compressed import CodedMatrix


@dataclass(frozen=True)
class CodedTarget(WeightTarget):
    """`matrix` holds hf_tensor[source]; `parameter` is where its code lies, with that of others."""

    matrix: CodedMatrix | None = None

    def store(self, name: str, weight: Weight) -> None:
        assert self.matrix is not None, name
        if isinstance(weight, Fp8Weight):
            part = dequantize(weight.cut(name, *self.ranges()), self.matrix.dtype)
        else:
            part = weight[self.source]
        self.matrix.store(part.to(self.matrix.device, self.matrix.dtype))

    def held(self, name: str) -> Iterator[StoredSlice]:
        assert self.matrix is not None, name
        starts = tuple(start for start, _ in self.ranges())
        yield StoredSlice(name, self.hf_shape, self.matrix.dtype, self.matrix, starts)
