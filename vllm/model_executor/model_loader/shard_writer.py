"""New values written into this rank's shards, with every element accounted for."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_formats.finite import note_finite, require_noted
from hf_formats.fp8 import FP8_DTYPE
from hf_formats.ranges import Ranges, relative, shape_of
from vllm.model_executor.model_loader.collect_digests import named_digests
from vllm.model_executor.model_loader.digest import WeightDigest, copy_with_digests
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.ops.weights import PackedMatrix

_SHOWN = 20


class ShardWriter:
    """Copies values into this rank's shards and remembers, until `finish`, which elements have been written.

    The digest of a shard is taken from its memory right after each copy, while the values are in a processor's cache. A
    matrix of a packed weight is assembled first and packed when it is complete; packing changes no value, so the digest
    of the assembled values is that of the matrix.

    Attributes:
        digests: name -> digest of this rank's shard, once `finish` has been called.
    """

    def __init__(self, views: dict[str, WeightView]) -> None:
        self._shards = dict(item for name, view in views.items() for item in view.shards(name))
        self._written: dict[str, list[Ranges]] = {name: [] for name in self._shards}
        self._are_finite: list[tuple[str, Tensor]] = []
        self._assembling: dict[str, Tensor] = {}  # packed matrices of which some elements were written
        device = next((shard.memory.device for shard in self._shards.values()), None)
        self._digests_N = torch.zeros(len(self._shards), dtype=torch.int64, device=device)
        self._totals: dict[str, Tensor] = dict(zip(self._shards, self._digests_N.unbind(), strict=True))
        self.digests: dict[str, WeightDigest] = {}

    def write(self, hf_name: str, ranges: Ranges, values: Tensor, of_values: Tensor | None = None) -> None:
        """Copy new values of hf_tensor[ranges]: for an FP8 weight its e4m3 values, or its blocks' scales in fp32.

        ValueError for values outside of this rank's shards, elements written before, or a wrong dtype.

        Args:
            of_values: an int64 scalar to which the digest of the values, in the dtype of the shard, is added as they
                are read.
        """
        shard = self._shards.get(hf_name)
        if shard is None:
            raise ValueError(f"weight {hf_name} is unknown to this model, or owned by other ranks only")
        note_finite(self._are_finite, hf_name, values)
        matrix = memory = shard.memory
        if isinstance(memory, PackedMatrix):
            if hf_name not in self._assembling:
                self._assembling[hf_name] = torch.empty(memory.shape, dtype=memory.dtype, device=memory.device)
            memory = self._assembling[hf_name]
        _check(hf_name, shard, ranges, values, self._written[hf_name])
        _note(self._written[hf_name], ranges)
        target, digest = memory[relative(ranges, shard.ranges)], self._totals[hf_name]
        starts = tuple(start for start, _ in ranges)
        copy_with_digests(hf_name, target, values, starts, of_values=of_values, of_target=digest)
        if isinstance(matrix, PackedMatrix) and self._num_written(hf_name) == matrix.numel():
            matrix.write(self._assembling.pop(hf_name))

    def finish(self) -> None:
        """ValueError naming every weight that was not written completely, or holds NaN or infinity."""
        sizes = {name: torch.Size(shard.shape).numel() for name, shard in self._shards.items()}
        missing = [
            f"{name} ({self._num_written(name)} of {size} elements came)"
            for name, size in sizes.items()
            if self._num_written(name) != size
        ]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ValueError(f"{len(missing)} weights were not updated: {', '.join(missing[:_SHOWN])}{more}")
        require_noted(self._are_finite, "the update")
        self.digests = named_digests(self._shards, self._digests_N)

    def _num_written(self, name: str) -> int:
        return sum(_num_elements(ranges) for ranges in self._written[name])


def _check(name: str, shard: WeightView, ranges: Ranges, values: Tensor, written: list[Ranges]) -> None:
    if len(ranges) != len(shard.shape) or values.dim() != len(ranges):
        raise ValueError(f"weight {name} has {len(shard.shape)} dimensions, the slice {values.dim()} of {ranges}")
    assert shape_of(ranges) == values.shape, (name, ranges, values.shape)
    if any(a < c or b > d for (a, b), (c, d) in zip(ranges, shard.ranges, strict=True)):
        raise ValueError(f"weight {name}: slice {ranges} came, this rank owns {shard.ranges} of {shard.hf_shape}")
    is_fp8 = shard.dtype == FP8_DTYPE
    fits = values.dtype == FP8_DTYPE if is_fp8 else values.is_floating_point() and values.element_size() >= 2
    if not fits:
        wanted = "float8_e4m3fn (quantise before it is cut)" if is_fp8 else "a floating dtype of 16 bits or more"
        raise ValueError(f"a slice of weight {name} is {values.dtype}; expected {wanted}")
    if any(_overlap(ranges, earlier) for earlier in written):
        raise ValueError(f"weight {name}: a part of slice {ranges} came before in this update")


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
