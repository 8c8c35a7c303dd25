"""Weight updates written into this rank's shards, with every element accounted for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_formats.finite import FiniteCheck
from hf_formats.fp8 import FP8_DTYPE
from vllm.model_executor.model_loader.collect_digests import named_digests
from vllm.model_executor.model_loader.digest import WeightDigest, copy_with_digests
from vllm.model_executor.model_loader.weight_view import Ranges, Shard, WeightView
from vllm.ops.weights import PackedMatrix

_SHOWN = 20


class WeightUpdate(NamedTuple):
    """New values of hf_tensor[starts : starts + values.shape]: for an FP8 weight its e4m3 values, or its blocks' scales
    in fp32.

    total: an int64 scalar to which the digest of `values` is added as they are read, or None.
    """

    hf_name: str
    starts: tuple[int, ...]
    values: Tensor
    total: Tensor | None = None


class ShardWriter:
    """Copies updates into this rank's shards and remembers, until `finish`, which elements have been written.

    The digest of a shard is taken from its memory right after each copy, while the values are in a processor's cache. A
    matrix of a packed weight is assembled first and packed when it is complete; packing changes no value, so the digest
    of the assembled values is that of the matrix.
    """

    def __init__(self, views: dict[str, WeightView]) -> None:
        self._shards: dict[str, Shard] = dict(item for name, view in views.items() for item in view.shards(name))
        self._written: dict[str, list[Ranges]] = {name: [] for name in self._shards}
        self._finite = FiniteCheck()
        self._assembling: dict[str, Tensor] = {}  # packed matrices of which some elements were written
        device = next((shard.values.device for shard in self._shards.values() if shard.values is not None), None)
        self._digests_N = torch.zeros(len(self._shards), dtype=torch.int64, device=device)
        self._totals: dict[str, Tensor] = dict(zip(self._shards, self._digests_N.unbind(), strict=True))

    def write(self, updates: Iterable[WeightUpdate]) -> None:
        """ValueError for an update outside of this rank's shards, of elements written before, or of a wrong dtype."""
        for update in updates:
            if update.hf_name not in self._shards:
                raise ValueError(f"weight {update.hf_name} is unknown to this model, or owned by other ranks only")
            self._write(update)
            del update  # or a receive buffer would live on while the next ones are filled

    def finish(self) -> dict[str, WeightDigest]:
        """Name -> digest of this rank's shard; ValueError naming every weight that was not written completely, or holds
        NaN or infinity.
        """
        sizes = {name: torch.Size(shard.shape).numel() for name, shard in self._shards.items()}
        missing = [
            f"{name} ({self._num_written(name)} of {size} elements came)"
            for name, size in sizes.items()
            if self._num_written(name) != size
        ]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ValueError(f"{len(missing)} weights were not updated: {', '.join(missing[:_SHOWN])}{more}")
        self._finite.require("the update")
        return named_digests(self._shards, self._digests_N)

    def _write(self, update: WeightUpdate) -> None:
        name = update.hf_name
        shard, written, digest = self._shards[name], self._written[name], self._totals[name]
        matrix = shard.values
        self._finite.add(name, update.values)
        if not isinstance(matrix, PackedMatrix):
            assert matrix is not None, name
            _copy(shard, matrix, update, written, digest)
            return
        if name not in self._assembling:
            self._assembling[name] = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
        _copy(shard, self._assembling[name], update, written, digest)
        if self._num_written(name) == matrix.numel():
            matrix.write(self._assembling.pop(name))

    def _num_written(self, name: str) -> int:
        return sum(_num_elements(ranges) for ranges in self._written[name])


def _copy(shard: Shard, memory: Tensor, update: WeightUpdate, written: list[Ranges], digest: Tensor) -> None:
    """Copy an update into the memory of its shard and add its digest, read from that memory, to `digest`."""
    name, starts, values, total = update
    if len(starts) != memory.dim() or values.dim() != len(starts):
        raise ValueError(f"weight {name} has {memory.dim()} dimensions, the slice {values.dim()} from {starts}")
    ranges = tuple((start, start + size) for start, size in zip(starts, values.shape, strict=True))
    index = tuple(slice(start - first, stop - first) for (start, stop), first in zip(ranges, shard.starts, strict=True))
    if any(part.start < 0 or part.stop > size for part, size in zip(index, shard.shape, strict=True)):
        raise ValueError(f"weight {name}: slice {ranges} came, this rank owns {shard.ranges} of {shard.hf_shape}")
    is_fp8 = shard.dtype == FP8_DTYPE
    fits = values.dtype == FP8_DTYPE if is_fp8 else values.is_floating_point() and values.element_size() >= 2
    if not fits:
        wanted = "float8_e4m3fn (quantise before it is cut)" if is_fp8 else "a floating dtype of 16 bits or more"
        raise ValueError(f"a slice of weight {name} is {values.dtype}; expected {wanted}")
    if any(_overlap(ranges, earlier) for earlier in written):
        raise ValueError(f"weight {name}: a part of slice {ranges} came before in this update")
    _note(written, ranges)
    copy_with_digests(name, memory[index], values, starts, of_values=total, of_target=digest)


def _note(written: list[Ranges], ranges: Ranges) -> None:
    """Add ranges, joined to the last ones if they continue these in one dimension, so that many small updates of a
    shard are one entry in the end.
    """
    last = written[-1] if written else ()
    differing = [dim for dim, (one, other) in enumerate(zip(last, ranges, strict=False)) if one != other]
    if len(differing) == 1 and last[differing[0]][1] == ranges[differing[0]][0]:
        (dim,) = differing
        written[-1] = (*ranges[:dim], (last[dim][0], ranges[dim][1]), *ranges[dim + 1 :])
    else:
        written.append(ranges)


def _overlap(one: Ranges, other: Ranges) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def _num_elements(ranges: Ranges) -> int:
    return torch.Size(stop - start for start, stop in ranges).numel()
