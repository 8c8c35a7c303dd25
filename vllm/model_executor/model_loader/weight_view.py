"""The weight mapping as data: what a rank owns of each Hugging Face tensor, and the place in memory that it has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hf_formats.fp8 import Fp8Weight, Sliceable, check_scale_shape, dequantize
from hf_formats.ranges import Ranges, shape_of
from hf_formats.stored_extras import is_derived_buffer
from vllm.model_executor.model_loader.digest import slice_digest
from vllm.ops.weights import PackedMatrix, PackedWeight
from vllm.ops.weights import Weight as HeldWeight


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
        return shape_of(self.ranges)

    def digest(self, hf_name: str) -> Tensor:
        """An int64 scalar, see `slice_digest`."""
        assert self.values is not None, hf_name
        values = self.values.read() if isinstance(self.values, PackedMatrix) else self.values
        return slice_digest(hf_name, values, self.starts)


_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")

Weight: TypeAlias = Sliceable | Fp8Weight
"""A full tensor that arrives or lies in a file: in a floating dtype, or in FP8 with its scales."""


@dataclass(frozen=True)
class WeightView:
    """parameter[local] = hf_tensor[source]; `parameter` is None when other ranks own the whole tensor."""

    hf_shape: tuple[int, ...]
    parameter: nn.Parameter | None = None
    local: tuple[int | slice, ...] = ()
    source: tuple[slice, ...] = ()

    def load(self, name: str, weight: Weight) -> None:
        """Copy this rank's shard, converting dtype and device; ValueError when the full tensor has another shape."""
        values = weight.weight_OI if isinstance(weight, Fp8Weight) else weight
        if tuple(values.shape) != self.hf_shape:
            raise ValueError(
                f"weight {name} has shape {tuple(values.shape)}, the model config asks for {self.hf_shape}"
            )
        if isinstance(weight, Fp8Weight):
            check_scale_shape(name, values.shape, weight.scale_inv.shape)
        elif not values.dtype.is_floating_point or values.dtype.itemsize < 2:
            raise ValueError(
                f"weight {name} is {values.dtype}; expected a floating dtype of 16 bits or more, or float8_e4m3fn with "
                "its scales"
            )
        if self.parameter is not None:
            self.store(name, weight)

    def store(self, name: str, weight: Weight) -> None:
        """`load` after its checks."""
        assert self.parameter is not None, name
        self.parameter.data[self.local].copy_(self.part(name, weight, self.parameter.dtype))

    def part(self, name: str, weight: Weight, dtype: torch.dtype) -> Tensor:
        """This rank's part of a full tensor; an FP8 weight is dequantised to `dtype`."""
        if isinstance(weight, Fp8Weight):
            return dequantize(weight.cut(name, *self.ranges()), dtype)
        return weight[self.source]

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        """(Hugging Face name, shard) of everything that this rank owns of the weight."""
        if self.parameter is not None:
            part = self.parameter.data[self.local]
            yield name, Shard(self.hf_shape, self.ranges(), part.dtype, part)

    def counted_shards(self, name: str, dtype: torch.dtype) -> Iterator[tuple[str, Shard]]:
        """`shards` without the elements that another rank counts; for a tensor of other ranks an empty shard in
        `dtype`.
        """
        yield from self.shards(name)
        if self.parameter is None:
            yield name, empty_shard(self.hf_shape, dtype)

    def ranges(self) -> Ranges:
        """[start, stop) of this rank's shard in each dimension of the Hugging Face tensor."""
        source = (*self.source, *[slice(None)] * (len(self.hf_shape) - len(self.source)))
        return tuple(part.indices(size)[:2] for part, size in zip(source, self.hf_shape, strict=True))


def empty_shard(hf_shape: tuple[int, ...], dtype: torch.dtype) -> Shard:
    """The shard of a tensor of which this rank owns no element."""
    return Shard(hf_shape, ((0, 0),) * len(hf_shape), dtype)


def is_skipped(name: str, num_layers: int) -> bool:
    """Whether the model does not use this tensor: one of a multi-token-prediction layer, or what the config implies."""
    layer = _LAYER_NAME.match(name)
    return (layer is not None and int(layer.group(1)) >= num_layers) or is_derived_buffer(name)


def load_weights(views: dict[str, WeightView], num_layers: int, weights: Iterable[tuple[str, Weight]]) -> set[str]:
    """Write every (hf_name, full tensor) to its place; return the names that were loaded.

    ValueError for a name that the model does not have.
    """
    loaded: set[str] = set()
    for name, weight in weights:
        view = views.get(name)
        if view is None:
            if is_skipped(name, num_layers):
                continue
            raise ValueError(
                f"weight {name} is unknown to this model; expected names such as {', '.join(list(views)[:3])}"
            )
        view.load(name, weight)
        loaded.add(name)
    return loaded


@dataclass(frozen=True)
class PackedWeightView(WeightView):
    """`matrix` is hf_tensor[source]; `parameter` is the memory of the packed weight that it belongs to."""

    matrix: PackedMatrix | None = None

    def store(self, name: str, weight: Weight) -> None:
        assert self.matrix is not None, name
        values = self.part(name, weight, self.matrix.dtype)
        self.matrix.write(values.to(self.matrix.device, self.matrix.dtype))

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        assert self.matrix is not None, name
        yield name, Shard(self.hf_shape, self.ranges(), self.matrix.dtype, self.matrix)


def view_of(
    weight: HeldWeight,
    hf_shape: tuple[int, ...],
    source: tuple[slice, ...],
    part: int,
    rows: slice,
    expert: int | None = None,
) -> WeightView:
    """The view of hf_tensor[source] in a weight: its part number `part`, which is `rows` of it, of `expert` if any."""
    if isinstance(weight, PackedWeight):
        return PackedWeightView(hf_shape, weight.memory, source=source, matrix=weight.matrix(expert or 0, part))
    return WeightView(hf_shape, weight, (rows,) if expert is None else (expert, rows), source)
