"""Sums and maxima over a process group, of tensors wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.utils import async_h2d


def reduce_over(values: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType, device: torch.device) -> Tensor:
    """``values`` summed or maximised over ``group``, where they were; every rank of it must call.

    ``device`` is where the group's collectives expect tensors.
    """
    if group.size() == 1:
        return values
    # NPU-ADAPTATION(hccl-no-float64): HCCL reduces no float64, but gathers it, and metrics are few numbers;
    # drop when HCCL's all-reduce takes float64.
    if values.dtype == torch.float64:
        mine = async_h2d(values.cpu().reshape(-1).view(torch.int32), device)  # no op of the device sees a float64
        gathered = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(gathered, mine, group=group)
        everyone = torch.cat(gathered).cpu().view(torch.float64).view(group.size(), *values.shape)
        return (everyone.amax(0) if op == dist.ReduceOp.MAX else everyone.sum(0)).to(values.device)
    # NPU-ADAPTATION END
    moved = async_h2d(values, device)
    dist.all_reduce(moved, op=op, group=group)
    return moved.to(values.device)


def mean_by_name(reports: Sequence[tuple[Mapping[str, float], float]], group: dist.ProcessGroup) -> dict[str, float]:
    """The weighted mean of each metric over the reports of every rank of ``group`` that have it; collective.

    Args:
        reports: this rank's (metrics, weight); ranks may have different names.
        group: the ranks.
    """
    names = {name for metrics, _ in reports for name in metrics}
    sums = {name: _weighted(reports, name) for name in names}
    if group.size() == 1:
        everyone = [sums]
    else:
        everyone = [{} for _ in range(group.size())]
        dist.all_gather_object(everyone, sums, group=group)
    found: dict[str, float] = {}
    for name in sorted({name for each in everyone for name in each}):
        totals = [each[name] for each in everyone if name in each]
        found[name] = sum(total for total, _ in totals) / max(sum(weight for _, weight in totals), 1e-9)
    return found


def _weighted(reports: Sequence[tuple[Mapping[str, float], float]], name: str) -> tuple[float, float]:
    having = [(metrics[name], weight) for metrics, weight in reports if name in metrics]
    return sum(value * weight for value, weight in having), sum(weight for _, weight in having)
