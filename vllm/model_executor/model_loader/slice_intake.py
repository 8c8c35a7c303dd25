"""New weights as slices, each put where this rank holds it and every element accounted for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_formats.fp8 import FP8_DTYPE
from vllm.model_executor.model_loader.collect_digests import named_digests
from vllm.model_executor.model_loader.digest import WeightDigest, copy_with_digests
from vllm.model_executor.model_loader.weight_target import StoredSlice, WeightTarget
from vllm.ops.weights import PackedMatrix

_SHOWN = 20
_Ranges = tuple[tuple[int, int], ...]


class WeightSlice(NamedTuple):
    """hf_tensor[starts : starts + values.shape]; of an FP8 weight its e4m3 values, or the fp32 scales of its blocks.

    total: where there is one, the digest of `values` is added to it as they are read: an int64 scalar.
    """

    hf_name: str
    starts: tuple[int, ...]
    values: Tensor
    total: Tensor | None = None


class SliceIntake:
    """Copies slices to their places; what has come of each tensor is remembered until `finish`.

    Digests are taken from the places right after each copy, while a processor has them in its cache. A matrix of a
    packed weight is assembled first, and packed when it is complete: packing changes no value that was summed up.
    """

    def __init__(self, targets: dict[str, WeightTarget]) -> None:
        held = (stored for name, target in targets.items() for stored in target.held(name))
        self._held: dict[str, StoredSlice] = {stored.hf_name: stored for stored in held}
        self._came: dict[str, list[_Ranges]] = {name: [] for name in self._held}
        self._open: dict[str, Tensor] = {}  # packed matrices of which some elements came
        device = next((stored.part.device for stored in self._held.values() if stored.part is not None), None)
        self._digests_N = torch.zeros(len(self._held), dtype=torch.int64, device=device)
        self._totals: dict[str, Tensor] = dict(zip(self._held, self._digests_N.unbind(), strict=True))

    def take(self, slices: Iterable[WeightSlice]) -> None:
        """ValueError for a slice that is not part of what this rank holds, came before, or has a wrong dtype."""
        for slice_ in slices:
            stored = self._held.get(slice_.hf_name)
            if stored is None:
                raise ValueError(f"weight {slice_.hf_name} is unknown to this model, or held by other ranks only")
            self._place(stored, slice_)
            del slice_  # or a buffer of what has arrived would live on while the next ones are filled

    def finish(self) -> dict[str, WeightDigest]:
        """Name -> digest of what this rank holds; ValueError naming every weight of which not all elements came."""
        missing = [
            f"{name} ({self._num_came(name)} of {_size(stored)} elements came)"
            for name, stored in self._held.items()
            if self._num_came(name) != _size(stored)
        ]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ValueError(f"{len(missing)} weights were not updated: {', '.join(missing[:_SHOWN])}{more}")
        return named_digests(list(self._held.values()), self._digests_N)

    def _place(self, stored: StoredSlice, slice_: WeightSlice) -> None:
        name, matrix = stored.hf_name, stored.part
        came, total = self._came[name], self._totals[name]
        if not isinstance(matrix, PackedMatrix):
            assert matrix is not None, name
            _place(stored, matrix, slice_, came, total)
            return
        if name not in self._open:
            self._open[name] = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
        _place(stored, self._open[name], slice_, came, total)
        if self._num_came(name) == matrix.numel():
            matrix.write(self._open.pop(name))

    def _num_came(self, name: str) -> int:
        return sum(_num_elements(ranges) for ranges in self._came[name])


def _size(stored: StoredSlice) -> int:
    assert stored.part is not None, stored.hf_name
    return stored.part.numel()


def _place(stored: StoredSlice, part: Tensor, slice_: WeightSlice, came: list[_Ranges], held: Tensor) -> None:
    """To its place in `part`; adds the slice to the digest of its tensor, `held`, as it is read from there."""
    name, starts, values, total = slice_
    if len(starts) != part.dim() or values.dim() != len(starts):
        raise ValueError(f"weight {name} has {part.dim()} dimensions, the slice {values.dim()} from {starts}")
    ranges = tuple((start, start + size) for start, size in zip(starts, values.shape, strict=True))
    here = tuple(slice(start - first, stop - first) for (start, stop), first in zip(ranges, stored.starts, strict=True))
    if any(cut.start < 0 or cut.stop > size for cut, size in zip(here, part.shape, strict=True)):
        mine = tuple((first, first + size) for first, size in zip(stored.starts, part.shape, strict=True))
        raise ValueError(f"weight {name}: slice {ranges} came, this rank holds {mine} of {stored.hf_shape}")
    is_fp8 = stored.dtype == FP8_DTYPE
    fits = values.dtype == FP8_DTYPE if is_fp8 else values.is_floating_point() and values.element_size() >= 2
    if not fits:
        wanted = "float8_e4m3fn (quantise before it is cut)" if is_fp8 else "a floating dtype of 16 bits or more"
        raise ValueError(f"a slice of weight {name} is {values.dtype}; expected {wanted}")
    if any(_overlap(ranges, earlier) for earlier in came):
        raise ValueError(f"weight {name}: a part of slice {ranges} came before in this update")
    _note(came, ranges)
    copy_with_digests(name, part[here], values, starts, of_values=total, of_target=held)


def _note(came: list[_Ranges], ranges: _Ranges) -> None:
    """Joined to the last where it goes on in one dimension: what comes in small pieces is one range in the end."""
    last = came[-1] if came else ()
    differing = [dim for dim, (one, other) in enumerate(zip(last, ranges, strict=False)) if one != other]
    if len(differing) == 1 and last[differing[0]][1] == ranges[differing[0]][0]:
        (dim,) = differing
        came[-1] = (*ranges[:dim], (last[dim][0], ranges[dim][1]), *ranges[dim + 1 :])
    else:
        came.append(ranges)


def _overlap(one: _Ranges, other: _Ranges) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def _num_elements(ranges: _Ranges) -> int:
    return torch.Size(stop - start for start, stop in ranges).numel()
