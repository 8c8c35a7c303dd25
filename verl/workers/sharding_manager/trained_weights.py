"""What a training rank gives of its weights: slices under Hugging Face names, quantised where the rollout holds FP8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.fp8 import (
    BLOCK,
    FP8_DTYPE,
    FP8_MAX,
    SCALE_SUFFIX,
    num_blocks,
    scales_of_peaks,
    touched,
)
from hf_formats.problems import raise_problems
from mindspeed_llm.sources import hf_view, relative
from mindspeed_llm.weight_plan import Fragment, Slice
from verl.workers.sharding_manager.transfer_plan import TransferPlan

_Key = tuple[str, Slice]


class TrainedWeights:
    """A training rank's tensors at the time of one sync.

    Collective over `group` when the plan has FP8 weights: the scale of a block that several fragments share is that of
    the largest magnitude in any of them. RuntimeError, on every rank, naming the weights that cannot be quantised.

    Args:
        params: this rank's tensors under the training engine's names; empty where nothing is trained.
    """

    def __init__(
        self, params: Mapping[str, Tensor], plan: TransferPlan, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._params = params
        self._is_fp8 = {name for name, dtype in plan.held_dtypes.items() if dtype == FP8_DTYPE}
        self._scales: dict[_Key, Tensor] = {}  # fp32, of the blocks that a fragment touches
        if self._is_fp8:
            self._scales = self._agree_on_scales(plan, group, device)

    def values(self, hf_name: str, ranges: Slice, fragment: Fragment) -> Tensor:
        """hf_tensor[ranges] of a fragment that this rank holds: a view, or e4m3 values, or scales of blocks."""
        weight_name = hf_name.removesuffix(SCALE_SUFFIX)
        if weight_name != hf_name:
            return self._scales[_key(fragment)][relative(ranges, _blocks(fragment.piece.hf_slice))]
        view = hf_view(self._params[fragment.local_name], fragment.piece).detach()
        part = view[relative(ranges, fragment.piece.hf_slice)]
        if hf_name not in self._is_fp8:
            return part
        return _quantised(part, ranges, self._scales[_key(fragment)], fragment)

    def _agree_on_scales(
        self, plan: TransferPlan, group: dist.ProcessGroup, device: torch.device
    ) -> dict[_Key, Tensor]:
        mine: dict[_Key, Fragment] = {}
        split: dict[str, tuple[int, int]] = {}  # weights with shared blocks -> their grids
        rank = group.rank()
        for fragment, holders in plan.quantised:
            if rank in holders:
                mine[_key(fragment)] = fragment
            name, extent = _key(fragment)
            shape = plan.hf_shapes[name]
            if not _has_whole_blocks(extent, shape):
                split[name] = (num_blocks(shape[0]), num_blocks(shape[1]))
        peaks = {
            key: _peaks(hf_view(self._params[fragment.local_name], fragment.piece).detach(), fragment.piece.hf_slice)
            for key, fragment in mine.items()
        }
        _refuse_non_finite(peaks, group)
        if split:
            _share_peaks(peaks, split, group, device)
        return {key: scales_of_peaks(peak) for key, peak in peaks.items()}


def _key(fragment: Fragment) -> _Key:
    return fragment.piece.hf_name, fragment.piece.hf_slice


def _blocks(extent: Slice) -> Slice:
    """Of the grid of scales: what a slice of the weight touches."""
    return tuple(touched(start, stop) for start, stop in extent)


def _has_whole_blocks(extent: Slice, shape: tuple[int, ...]) -> bool:
    return all(
        start % BLOCK == 0 and (stop % BLOCK == 0 or stop == size)
        for (start, stop), size in zip(extent, shape, strict=True)
    )


def _bands(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut at the borders of blocks."""
    while start < stop:
        end = min(stop, (start // BLOCK + 1) * BLOCK)
        yield start, end
        start = end


def _peaks(view: Tensor, extent: Slice) -> Tensor:
    """fp32 [SR, SC]: largest magnitude, in this fragment, of each block that it touches."""
    (r0, r1), (c0, c1) = extent
    padding = (c0 % BLOCK, -c1 % BLOCK)
    rows = []
    for start, stop in _bands(r0, r1):
        band = torch.nn.functional.pad(view[start - r0 : stop - r0].abs(), padding)
        rows.append(band.unflatten(1, (-1, BLOCK)).amax(dim=(0, 2)))
    return torch.stack(rows).float()


def _quantised(part: Tensor, ranges: Slice, scales: Tensor, fragment: Fragment) -> Tensor:
    """e4m3 of `part`, as `quantize` of the whole tensor has it; a band of blocks at a time."""
    (r0, r1), (c0, c1) = ranges
    first_row, first_column = (start // BLOCK for start, _ in fragment.piece.hf_slice)
    columns = torch.arange(c0, c1, device=part.device) // BLOCK - first_column
    result = torch.empty_like(part, dtype=FP8_DTYPE)  # in the order of memory
    for start, stop in _bands(r0, r1):
        scaled = part[start - r0 : stop - r0].float() / scales[start // BLOCK - first_row][columns]
        result[start - r0 : stop - r0] = scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    return result


def _refuse_non_finite(peaks: dict[_Key, Tensor], group: dist.ProcessGroup) -> None:
    bad = sorted({name for (name, _), peak in peaks.items() if bool((~torch.isfinite(peak)).any())})
    of_ranks: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(of_ranks, bad, group=group)
    names = sorted(set().union(*of_ranks))
    raise_problems(
        "the weight sync", [f"{name} holds inf or nan and cannot be quantised" for name in names], "Look at the loss."
    )


def _share_peaks(
    peaks: dict[_Key, Tensor], grids: dict[str, tuple[int, int]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise the peaks of blocks that fragments share to the largest of them, in place; collective."""
    table = torch.zeros(sum(rows * columns for rows, columns in grids.values()), device=device)
    parts = table.split([rows * columns for rows, columns in grids.values()])
    of_name = {name: part.view(grids[name]) for name, part in zip(grids, parts, strict=True)}
    shared = {key: tuple(slice(*part) for part in _blocks(key[1])) for key in peaks if key[0] in grids}
    for (name, extent), blocks in shared.items():
        here = of_name[name][blocks]
        here.copy_(torch.maximum(here, peaks[name, extent]))
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    for (name, extent), blocks in shared.items():
        peaks[name, extent] = of_name[name][blocks]
