"""Weight mapping as data: where the slice of a Hugging Face tensor goes on this rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hf_formats.fp8 import Fp8Weight, Sliceable, check_scale_shape, dequantize
from vllm.model_executor.model_loader.digest import slice_digest
from vllm.ops.weights import PackedMatrix

_DERIVED_NAME = re.compile(r".*\.rotary_emb\.inv_freq$")
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")

Weight: TypeAlias = Sliceable | Fp8Weight
"""A full tensor as it arrives, or lies in a file: in a floating dtype, or in FP8 with its scales."""


@dataclass(frozen=True)
class StoredSlice:
    """What this rank holds of a tensor under its Hugging Face name."""

    hf_name: str
    hf_shape: tuple[int, ...]
    dtype: torch.dtype
    part: Tensor | PackedMatrix | None  # None: nothing
    starts: tuple[int, ...] = ()  # where the part begins in the tensor

    def digest(self) -> Tensor:
        """int64 scalar, see `slice_digest`."""
        assert self.part is not None, self.hf_name
        values = self.part.read() if isinstance(self.part, PackedMatrix) else self.part
        return slice_digest(self.hf_name, values, self.starts)


@dataclass(frozen=True)
class WeightTarget:
    """parameter[local] = hf_tensor[source]; `parameter` None: the tensor belongs to other ranks only."""

    hf_shape: tuple[int, ...]
    parameter: nn.Parameter | None = None
    local: tuple[int | slice, ...] = ()
    source: tuple[slice, ...] = ()

    def load(self, name: str, weight: Weight) -> None:
        """Copy this rank's slice, converting dtype and device; ValueError when the full tensor has another shape."""
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
        """`load` once the weight is known to fit."""
        assert self.parameter is not None, name
        if isinstance(weight, Fp8Weight):
            part = dequantize(weight.cut(name, *self.ranges()), self.parameter.dtype)
        else:
            part = weight[self.source]
        self.parameter.data[self.local].copy_(part)

    def held(self, name: str) -> Iterator[StoredSlice]:
        """Everything that this rank holds of the weight, under Hugging Face names."""
        if self.parameter is not None:
            part = self.parameter.data[self.local]
            yield StoredSlice(name, self.hf_shape, part.dtype, part, tuple(start for start, _ in self.ranges()))

    def stored(self, name: str, dtype: torch.dtype) -> Iterator[StoredSlice]:
        """`held` with nothing in it that another rank counts, and a slice of nothing in `dtype` for a weight of other
        ranks.
        """
        yield from self.held(name)
        if self.parameter is None:
            yield StoredSlice(name, self.hf_shape, dtype, None)

    def ranges(self) -> list[tuple[int, int]]:
        """[start, stop) of this rank's slice along each dimension of the Hugging Face tensor."""
        source = (*self.source, *[slice(None)] * (len(self.hf_shape) - len(self.source)))
        return [part.indices(size)[:2] for part, size in zip(source, self.hf_shape, strict=True)]


def is_skipped(name: str, num_layers: int) -> bool:
    """Tensors of a checkpoint that the model has no use for: multi-token-prediction layers and stored rotary tables."""
    layer = _LAYER_NAME.match(name)
    return (layer is not None and int(layer.group(1)) >= num_layers) or _DERIVED_NAME.match(name) is not None


def load_weights(targets: dict[str, WeightTarget], num_layers: int, weights: Iterable[tuple[str, Weight]]) -> set[str]:
    """Put every (hf_name, full tensor) where it belongs; returns the names taken.

    ValueError for a name the model does not have.
    """
    loaded: set[str] = set()
    for name, weight in weights:
        target = targets.get(name)
        if target is None:
            if is_skipped(name, num_layers):
                continue
            raise ValueError(
                f"weight {name} is unknown to this model; expected names such as {', '.join(list(targets)[:3])}"
            )
        target.load(name, weight)
        loaded.add(name)
    return loaded
