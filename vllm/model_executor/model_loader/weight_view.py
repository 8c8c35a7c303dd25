"""The weight mapping as data: what a rank owns of each Hugging Face tensor, and the place in memory that it has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hf_formats.fp8 import Fp8Weight, Sliceable, check_scale_shape, dequantize
from hf_formats.ranges import Ranges, index_of, shape_of
from hf_formats.stored_extras import is_derived_buffer
from vllm.model_executor.model_loader.digest import slice_digest
from vllm.ops.weights import PackedMatrix, PackedWeight
from vllm.ops.weights import Weight as HeldWeight

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")

Weight: TypeAlias = Sliceable | Fp8Weight
"""A full tensor that arrives or lies in a file: in a floating dtype, or in FP8 with its scales."""


@dataclass(frozen=True)
class WeightView:
    """hf_tensor[ranges] of a tensor of `hf_shape`, stored in `dtype` as ``parameter[local]``, or as a packed matrix.

    parameter: None where only the plan is needed, and for a tensor that other ranks own, whose ranges are empty.
    """

    hf_shape: tuple[int, ...]
    ranges: Ranges
    dtype: torch.dtype
    parameter: Tensor | PackedMatrix | None = field(default=None, compare=False)
    local: tuple[int | slice, ...] = field(default=(slice(None),), compare=False)

    @property
    def starts(self) -> tuple[int, ...]:
        """The index of the first element in the whole tensor."""
        return tuple(start for start, _ in self.ranges)

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.ranges)

    @property
    def memory(self) -> Tensor | PackedMatrix:
        """Where the values lie, in the shape of the ranges."""
        assert self.parameter is not None, "a view without memory"
        return self.parameter if isinstance(self.parameter, PackedMatrix) else self.parameter.data[self.local]

    def read(self) -> Tensor:
        """The values: their memory, or a copy of a packed matrix."""
        memory = self.memory
        return memory.read() if isinstance(memory, PackedMatrix) else memory

    def digest(self, hf_name: str) -> Tensor:
        """An int64 scalar, see `slice_digest`."""
        return slice_digest(hf_name, self.read(), self.starts)

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
        """`load` after its checks; an FP8 weight is dequantised."""
        memory = self.memory
        if isinstance(weight, Fp8Weight):
            values = dequantize(weight.cut(name, *self.ranges), self.dtype)
        else:
            values = weight[index_of(self.ranges)]
        if isinstance(memory, PackedMatrix):
            memory.write(values.to(memory.device, memory.dtype))
        else:
            memory.copy_(values)

    def shards(self, name: str) -> Iterator[tuple[str, WeightView]]:
        """(Hugging Face name, view) of everything that this rank owns of the weight."""
        if self.parameter is not None:
            yield name, self

    def counted_shards(self, name: str) -> Iterator[tuple[str, WeightView]]:
        """`shards` without the elements that another rank counts; for a tensor of other ranks an empty view."""
        yield name, self


def whole_view(parameter: Tensor) -> WeightView:
    """The view of a tensor that every rank owns."""
    shape = tuple(parameter.shape)
    return WeightView(shape, tuple((0, size) for size in shape), parameter.dtype, parameter)


def empty_view(hf_shape: tuple[int, ...], dtype: torch.dtype) -> WeightView:
    """The view of a tensor of which this rank owns no element."""
    return WeightView(hf_shape, ((0, 0),) * len(hf_shape), dtype)


def view_of(
    weight: HeldWeight,
    hf_shape: tuple[int, ...],
    source: tuple[slice, ...],
    part: int,
    rows: slice,
    expert: int | None = None,
) -> WeightView:
    """The view of hf_tensor[source] in a weight: its part number `part`, which is `rows` of it, of `expert` if any."""
    slices = (*source, *[slice(None)] * (len(hf_shape) - len(source)))
    ranges = tuple(part.indices(size)[:2] for part, size in zip(slices, hf_shape, strict=True))
    if isinstance(weight, PackedWeight):
        return WeightView(hf_shape, ranges, weight.dtype, weight.matrix(expert or 0, part))
    return WeightView(hf_shape, ranges, weight.dtype, weight, (rows,) if expert is None else (expert, rows))


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
