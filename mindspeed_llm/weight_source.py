"""A source of HF tensors, and how the shards of the weight plan are read from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from hf_formats.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX, Fp8Blocks, check_scale_values, dequantize_into, touched
from hf_formats.ranges import Ranges, index_of, intersection, relative, shape_of
from mindspeed_llm.weight_plan import Shard, TensorPlan

_SHOWN_NAMES = 4

Origin = tuple[int, int]
CopyValues = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Origin], None]


class WeightSource(Protocol):
    """Anything that can read parts of tensors under HF names."""

    def names(self) -> Collection[str]:
        """HF names that can be read."""
        ...

    def dtype(self, hf_name: str) -> torch.dtype:
        """Dtype in which the tensor is stored."""
        ...

    def read(self, hf_name: str, ranges: Ranges) -> torch.Tensor:
        """hf_tensor[ranges] on the CPU in its stored dtype; it may share memory with the source: do not write to it."""
        ...


def hf_view(local: torch.Tensor, shard: Shard) -> torch.Tensor:
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


def copy_values(target: torch.Tensor, values: torch.Tensor, scale_inv: torch.Tensor | None, origin: Origin) -> None:
    """``target[...] = values``, cast; with scales the values, which begin at ``origin`` of their matrix, are FP8."""
    if scale_inv is None:
        target.copy_(values)
    else:
        dequantize_into(target, Fp8Blocks(values, scale_inv, (origin[0] % BLOCK, origin[1] % BLOCK)))


def fill(local: torch.Tensor, tensor: TensorPlan, source: WeightSource, copy: CopyValues = copy_values) -> None:
    """Read every shard of ``tensor`` from ``source`` into ``local`` (shape ``tensor.shape``), casting to its dtype.

    FP8 weights are multiplied by the scales of the blocks that a shard touches and rounded once. ``copy`` writes the
    values of a shard; another implementation of it gives the same bits faster.
    """
    for shard in tensor.shards:
        values, target = source.read(shard.hf_name, shard.ranges), hf_view(local, shard)
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


def assemble(
    what: str, wanted: Ranges, shards: Sequence[Shard], read: Callable[[Shard, Ranges], torch.Tensor]
) -> torch.Tensor:
    """The part ``wanted`` of an HF tensor from its ``shards``; ``read`` returns a part of one shard.

    A part that lies in one shard is returned as ``read`` returned it. ValueError when elements are in no shard.
    """
    result: torch.Tensor | None = None
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
