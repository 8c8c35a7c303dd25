"""The weight mapping as data: what a rank owns of each Hugging Face tensor, and the place in memory that it has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hf_formats.fp8 import (
    BLOCK,
    FP8_DTYPE,
    SCALE_SUFFIX,
    Fp8Weight,
    Sliceable,
    check_scale_shape,
    dequantize,
    num_blocks,
    quantize,
    touched,
)
from hf_formats.ranges import Ranges, index_of, relative, shape_of
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
    scales: fp32 [SR, SC] of an e4m3 weight: those of the blocks of the Hugging Face tensor that the ranges touch, so
        that every layout holds the same values.
    """

    hf_shape: tuple[int, ...]
    ranges: Ranges
    dtype: torch.dtype
    parameter: Tensor | PackedMatrix | None = field(default=None, compare=False)
    local: tuple[int | slice, ...] = field(default=(slice(None),), compare=False)
    scales: Tensor | None = field(default=None, compare=False)

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
        """`load` after its checks, quantised or dequantised where only one of both is in FP8."""
        memory = self.memory
        if self.scales is not None:
            values, scales = _fp8_part(name, weight, self.ranges)
            self.scales.copy_(scales)
        elif isinstance(weight, Fp8Weight):
            values = dequantize(weight.cut(name, *self.ranges), self.dtype)
        else:
            values = weight[index_of(self.ranges)]
        if isinstance(memory, PackedMatrix):
            memory.write(values.to(memory.device, memory.dtype))
        else:
            memory.copy_(values)

    def shards(self, name: str) -> Iterator[tuple[str, WeightView]]:
        """(Hugging Face name, view) of everything that this rank owns of the weight: an e4m3 weight is followed, under
        the checkpoint's name for them, by the scales of all blocks that its values touch.
        """
        if self.parameter is not None:
            yield name, self
        if self.scales is not None:
            blocks = tuple(touched(start, stop) for start, stop in self.ranges)
            yield name + SCALE_SUFFIX, WeightView(self._scale_shape, blocks, torch.float32, self.scales)

    def counted_shards(self, name: str) -> Iterator[tuple[str, WeightView]]:
        """`shards` without the elements that another rank counts; for a tensor of other ranks an empty view.

        A scale counts on the rank that owns the first element of its block.
        """
        yield name, self
        if self.scales is not None:
            own = tuple((num_blocks(start), num_blocks(stop)) for start, stop in self.ranges)
            local = relative(own, tuple(touched(start, stop) for start, stop in self.ranges))
            yield name + SCALE_SUFFIX, WeightView(self._scale_shape, own, torch.float32, self.scales, local)
        elif self.dtype == FP8_DTYPE:
            yield name + SCALE_SUFFIX, empty_view(self._scale_shape, torch.float32)

    @property
    def _scale_shape(self) -> tuple[int, ...]:
        return tuple(map(num_blocks, self.hf_shape))


def _fp8_part(name: str, weight: Weight, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """e4m3 values and scales of a part; of a weight that is not in FP8 the blocks of this part are quantised."""
    (r0, r1), (c0, c1) = ranges
    if isinstance(weight, Fp8Weight):
        values, scales, _ = weight.cut(name, (r0, r1), (c0, c1))
        return values, scales
    (br0, br1), (bc0, bc1) = touched(r0, r1), touched(c0, c1)
    try:
        blocks = quantize(weight[br0 * BLOCK : br1 * BLOCK, bc0 * BLOCK : bc1 * BLOCK])
    except ValueError as error:
        raise ValueError(f"weight {name}: {error}") from error
    first_row, first_column = r0 - br0 * BLOCK, c0 - bc0 * BLOCK
    part = blocks.weight_OI[first_row : first_row + r1 - r0, first_column : first_column + c1 - c0]
    return part, blocks.scale_inv


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
