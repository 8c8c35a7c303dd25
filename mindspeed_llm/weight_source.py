"""A source of HF tensors, and how the shards of the weight plan are read from it."""

from __future__ import annotations

import math
import mmap
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hf_formats.config import HFModelConfig
from hf_formats.file_region import FileRegion
from hf_formats.finite import require_finite
from hf_formats.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX, Fp8Blocks, check_scale_values, dequantize_into, touched
from hf_formats.ranges import Ranges, index_of, intersection, relative, shape_of
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.weight_plan import Naming, Shard, TensorPlan, model_shards

_SHOWN_NAMES = 4
_WILL_NEED_BYTES = 1 << 20  # below this the system's own read-ahead is as good

Origin = tuple[int, int]
CopyValues = Callable[[Tensor, Tensor, Tensor | None, Origin], None]


class WeightSource(Protocol):
    """Anything that can read parts of tensors under HF names."""

    def names(self) -> Collection[str]: ...

    def dtype(self, hf_name: str) -> torch.dtype: ...

    def read(self, hf_name: str, ranges: Ranges) -> Tensor:
        """hf_tensor[ranges] on the CPU in its stored dtype; it may share memory with the source: do not write to it."""
        ...


class Checkpoint(WeightSource, AbstractContextManager["Checkpoint"]):
    """Weights on disk, in any of the supported forms; to be closed after use."""

    path: Path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the files; tensors that were read stay valid."""

    def where(self, hf_name: str) -> str:
        """The file or directory that holds a tensor, for errors."""
        return str(self.path)

    @abstractmethod
    def describe(self) -> str:
        """Which form it is, and what is in it, for a log."""


class PlannedCheckpoint(Checkpoint):
    """A checkpoint of the training engine's tensors, whose shards of HF tensors follow from model and layout."""

    def __init__(self, path: Path, hf: HFModelConfig, layout: ParallelLayout, naming: Naming) -> None:
        self.path, self.hf, self.layout, self.naming = path, hf, layout, naming
        self._shards = model_shards(hf, layout, naming)

    def names(self) -> Collection[str]:
        """Every HF tensor of the model."""
        return self._shards.keys()

    def read(self, hf_name: str, ranges: Ranges | None = None) -> Tensor:
        """hf_tensor[ranges], by default the whole tensor."""
        shards = self._shards.get(hf_name)
        if shards is None:
            raise ValueError(f"{self.path} has no tensor {hf_name}")
        ranges = ranges or tuple((0, size) for size in hf_tensors(self.hf)[hf_name][0])
        return assemble(f"{self.path}: {hf_name}", ranges, shards, self._read_shard)

    @abstractmethod
    def _read_shard(self, shard: Shard, ranges: Ranges) -> Tensor:
        """The part ``ranges`` of a shard, in the orientation of the HF tensor."""


def hf_view(local: Tensor, shard: Shard) -> Tensor:
    """The part of ``local`` that ``shard`` fills, as a view in the orientation of the HF tensor."""
    view = local[index_of(shard.local_ranges)]
    if view.dim() > len(shard.ranges):
        view = view.squeeze(0)
    return view.T if shard.transpose else view


def plain_dtype(source: WeightSource, hf_name: str) -> torch.dtype:
    """Dtype in which a tensor is computed with: the stored one, BF16 for FP8."""
    dtype = source.dtype(hf_name)
    return torch.bfloat16 if dtype == FP8_DTYPE else dtype


def stored_dtype(source: WeightSource, tensor: TensorPlan) -> torch.dtype:
    """The plain dtype that all HF tensors of ``tensor`` have; ValueError when they differ."""
    dtypes = {plain_dtype(source, shard.hf_name) for shard in tensor.shards}
    if len(dtypes) > 1:
        names = ", ".join(shard.hf_name for shard in tensor.shards[:_SHOWN_NAMES])
        raise ValueError(f"{tensor.name} is made of tensors of different dtypes {dtypes}: {names} ...")
    return dtypes.pop()


def copy_values(target: Tensor, values: Tensor, scale_inv: Tensor | None, origin: Origin) -> None:
    """``target[...] = values``, cast; with scales the values, which begin at ``origin`` of their matrix, are FP8."""
    if scale_inv is None:
        target.copy_(values)
    else:
        dequantize_into(target, Fp8Blocks(values, scale_inv, (origin[0] % BLOCK, origin[1] % BLOCK)))


def fill(local: Tensor, tensor: TensorPlan, source: WeightSource, copy: CopyValues = copy_values) -> None:
    """Read every shard of ``tensor`` from ``source`` into ``local`` (shape ``tensor.shape``), casting to its dtype.

    FP8 weights are multiplied by the scales of the blocks that a shard touches and rounded once. ``copy`` writes the
    values of a shard; another implementation of it gives the same bits faster. ValueError for NaN or infinity.
    """
    for shard in tensor.shards:
        values, target = source.read(shard.hf_name, shard.ranges), hf_view(local, shard)
        where = source.where(shard.hf_name) if isinstance(source, Checkpoint) else "the source"
        require_finite(shard.hf_name, values, where)
        if values.dtype != FP8_DTYPE:
            copy(target, values, None, (0, 0))
            continue
        if shard.hf_name + SCALE_SUFFIX not in source.names():
            raise ValueError(f"{shard.hf_name} is FP8 and has no {SCALE_SUFFIX}; fetch the checkpoint again")
        (row, row_end), (column, column_end) = shard.ranges
        blocks = (touched(row, row_end), touched(column, column_end))
        scales = source.read(shard.hf_name + SCALE_SUFFIX, blocks)
        check_scale_values(shard.hf_name, scales, (blocks[0][0], blocks[1][0]))
        copy(target, values, scales, (row, column))


def assemble(what: str, wanted: Ranges, shards: Sequence[Shard], read: Callable[[Shard, Ranges], Tensor]) -> Tensor:
    """The part ``wanted`` of an HF tensor from its ``shards``; ``read`` returns a part of one shard.

    A part that lies in one shard is returned as ``read`` returned it. ValueError when elements are in no shard.
    """
    result: Tensor | None = None
    num_found = 0
    for shard in shards:
        common = intersection(shard.ranges, wanted)
        if common is None:
            continue
        values = read(shard, common)
        if common == wanted:
            return values
        if result is None:
            result = torch.empty(shape_of(wanted), dtype=values.dtype)
        result[relative(common, wanted)] = values
        num_found += values.numel()
    if result is None or num_found != result.numel():
        raise ValueError(f"{what} has no elements at {wanted}")
    return result


def read_region(region: FileRegion, ranges: Ranges | None = None) -> Tensor:
    """The slice (default: all) of a tensor as a view of its file: nothing is read until it is used.

    Only the rows (dim 0) that ``ranges`` touches are mapped, privately: a write would never reach the file.
    """
    if ranges is None:
        ranges = tuple((0, size) for size in region.shape)
    shape = tuple(stop - start for start, stop in ranges)
    if not math.prod(shape):
        return torch.empty(shape, dtype=region.dtype)
    row_elements = math.prod(region.shape[1:])
    start, stop = ranges[0] if ranges else (0, 1)
    first_byte = region.offset + start * row_elements * region.dtype.itemsize
    count = (stop - start) * row_elements
    aligned = first_byte - first_byte % mmap.ALLOCATIONGRANULARITY
    length = first_byte - aligned + count * region.dtype.itemsize
    with region.file.open("rb") as stream:
        mapping = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_COPY, offset=aligned)
    if length >= _WILL_NEED_BYTES and hasattr(mmap, "MADV_WILLNEED"):
        mapping.madvise(mmap.MADV_WILLNEED)
    rows = torch.frombuffer(mapping, dtype=region.dtype, count=count, offset=first_byte - aligned)
    rows = rows.view(shape[:1] + region.shape[1:])
    return rows[(slice(None), *(slice(a, b) for a, b in ranges[1:]))] if ranges else rows
