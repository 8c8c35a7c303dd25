"""The values that a training rank sends: parts of its shards, quantised where the rollout ranks store FP8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.fp8 import BLOCK, FP8_DTYPE, FP8_MAX, SCALE_SUFFIX, num_blocks, scales_of_peaks, touched
from hf_formats.problems import raise_problems
from hf_formats.ranges import Ranges, index_of, relative
from mindspeed_llm.weight_plan import Shard
from mindspeed_llm.weight_source import hf_view
from verl.workers.weight_sync.plan import Transfer, TransferPlan

_Key: TypeAlias = tuple[str, Ranges]
Scales: TypeAlias = dict[_Key, Tensor]  # by the name and the ranges of a training shard


def agreed_scales(
    params: Mapping[str, Tensor], plan: TransferPlan, group: dist.ProcessGroup, device: torch.device
) -> Scales:
    """fp32 [SR, SC] of each shard of this rank: the scales of the blocks that it touches, where rollouts store FP8.

    Collective over `group` when the plan has such weights: the scale of a block that several shards share comes from
    the largest magnitude in any of them. RuntimeError, on every rank, naming the weights that cannot be quantised.

    Args:
        params: this rank's tensors under the training engine's names; empty where nothing is trained.
    """
    if not plan.quantised:
        return {}
    mine: dict[_Key, Shard] = {}
    shared: dict[str, tuple[int, int]] = {}  # weights with blocks in several shards -> their grids of blocks
    rank = group.rank()
    for shard, source_ranks in plan.quantised:
        if rank in source_ranks:
            mine[_key(shard)] = shard
        shape = plan.tensors[shard.hf_name].hf_shape
        if not _has_whole_blocks(shard.ranges, shape):
            shared[shard.hf_name] = (num_blocks(shape[0]), num_blocks(shape[1]))
    peaks = {key: _peaks(_view(params, shard), shard.ranges) for key, shard in mine.items()}
    _refuse_non_finite(peaks, group)
    if shared:
        _share_peaks(peaks, shared, group, device)
    return {key: scales_of_peaks(peak) for key, peak in peaks.items()}


def trained_values(params: Mapping[str, Tensor], scales: Scales, transfer: Transfer) -> Tensor:
    """The values of a transfer, from a shard of this rank: a view, or e4m3 values, or the scales of blocks."""
    shard, ranges = transfer.shard, transfer.ranges
    if transfer.hf_name.endswith(SCALE_SUFFIX):
        return scales[_key(shard)][relative(ranges, _blocks(shard.ranges))]
    part = _view(params, shard)[relative(ranges, shard.ranges)]
    return part if transfer.dtype != FP8_DTYPE else _quantised(part, ranges, scales[_key(shard)], shard)


def _view(params: Mapping[str, Tensor], shard: Shard) -> Tensor:
    return hf_view(params[shard.param], shard).detach()


def _key(shard: Shard) -> _Key:
    return shard.hf_name, shard.ranges


def _blocks(ranges: Ranges) -> Ranges:
    """The blocks, in the grid of scales, that a part of the weight touches."""
    return tuple(touched(start, stop) for start, stop in ranges)


def _has_whole_blocks(ranges: Ranges, shape: tuple[int, ...]) -> bool:
    return all(
        start % BLOCK == 0 and (stop % BLOCK == 0 or stop == size)
        for (start, stop), size in zip(ranges, shape, strict=True)
    )


def _bands(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut at the borders of blocks."""
    while start < stop:
        end = min(stop, (start // BLOCK + 1) * BLOCK)
        yield start, end
        start = end


def _peaks(view: Tensor, ranges: Ranges) -> Tensor:
    """fp32 [SR, SC]: the largest magnitude, in this shard, of each block that it touches."""
    (r0, r1), (c0, c1) = ranges
    padding = (c0 % BLOCK, -c1 % BLOCK)
    rows = []
    for start, stop in _bands(r0, r1):
        band = torch.nn.functional.pad(view[start - r0 : stop - r0].abs(), padding)
        rows.append(band.unflatten(1, (-1, BLOCK)).amax(dim=(0, 2)))
    return torch.stack(rows).float()


def _quantised(part: Tensor, ranges: Ranges, scales: Tensor, shard: Shard) -> Tensor:
    """The e4m3 values of `part`, as `quantize` of the whole tensor gives them; one row of blocks at a time."""
    (r0, r1), (c0, c1) = ranges
    first_row, first_column = (start // BLOCK for start, _ in shard.ranges)
    columns = torch.arange(c0, c1, device=part.device) // BLOCK - first_column
    result = torch.empty_like(part, dtype=FP8_DTYPE)  # in the order of memory
    for start, stop in _bands(r0, r1):
        scaled = part[start - r0 : stop - r0].float() / scales[start // BLOCK - first_row][columns]
        result[start - r0 : stop - r0] = scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    return result


def _refuse_non_finite(peaks: dict[_Key, Tensor], group: dist.ProcessGroup) -> None:
    bad = sorted({name for (name, _), peak in peaks.items() if bool((~torch.isfinite(peak)).any())})
    by_rank: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(by_rank, bad, group=group)
    names = sorted(set().union(*by_rank))
    raise_problems(
        "the weight sync", [f"{name} holds inf or nan and cannot be quantised" for name in names], "Look at the loss."
    )


def _share_peaks(
    peaks: dict[_Key, Tensor], grids: dict[str, tuple[int, int]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise the peaks of blocks that several shards share to the largest of them, in place; collective."""
    table = torch.zeros(sum(rows * columns for rows, columns in grids.values()), device=device)
    parts = table.split([rows * columns for rows, columns in grids.values()])
    by_name = {name: part.view(grids[name]) for name, part in zip(grids, parts, strict=True)}
    shared = {key: index_of(_blocks(key[1])) for key in peaks if key[0] in grids}
    for (name, ranges), index in shared.items():
        here = by_name[name][index]
        here.copy_(torch.maximum(here, peaks[name, ranges]))
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    for (name, ranges), index in shared.items():
        peaks[name, ranges] = by_name[name][index]
