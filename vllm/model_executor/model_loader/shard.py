"""A shard: what a rank of an engine owns of a tensor of the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_formats.ranges import Ranges, shape_of
from vllm.model_executor.model_loader.digest import slice_digest
from vllm.ops.weights import PackedMatrix


@dataclass(frozen=True, slots=True)
class Shard:
    """hf_tensor[ranges] of a tensor of `hf_shape`, stored in `dtype`.

    values: its memory on this rank; None where only the plan is needed, and for a tensor that other ranks own.
    """

    hf_shape: tuple[int, ...]
    ranges: Ranges
    dtype: torch.dtype
    values: Tensor | PackedMatrix | None = field(default=None, compare=False)

    @property
    def starts(self) -> tuple[int, ...]:
        """The index of the first element in the whole tensor."""
        return tuple(start for start, _ in self.ranges)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return shape_of(self.ranges)

    def digest(self, hf_name: str) -> Tensor:
        """An int64 scalar, see `slice_digest`."""
        assert self.values is not None, hf_name
        values = self.values.read() if isinstance(self.values, PackedMatrix) else self.values
        return slice_digest(hf_name, values, self.starts)
