"""How unevenly tokens reach the ranks that share the experts, which sets a step's time and memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.parallel_state import ProcessGroups


class ExpertLoad:
    """The load of one layer's dispatches: rows of the fullest expert-parallel rank over the mean of all; 1 is balanced.

    Attributes:
        num: dispatches · total: sum of their loads · most: the largest.
    """

    def __init__(self) -> None:
        self.num, self.total, self.most = 0, 0.0, 0.0

    def add(self, rows_E: Tensor, num_ranks: int) -> None:
        """Add one dispatch; rows_E: int64 on the host, the rows of every expert; rank r has the r-th of equal parts."""
        rows = rows_E.view(num_ranks, -1).sum(1)
        mean = int(rows.sum()) / num_ranks
        if mean:
            load = int(rows.max()) / mean
            self.num, self.total, self.most = self.num + 1, self.total + load, max(self.most, load)


def collect_expert_loads(model: nn.Module, groups: ProcessGroups) -> tuple[float, float] | None:
    """Return (mean over layers of their mean, the largest) since the last call; None when nothing was dispatched.

    The same on all ranks. Collective over ``groups.world``; every rank calls it.
    """
    means, most = [], 0.0
    for module in model.modules():
        load = getattr(getattr(module, "token_dispatcher", None), "load", None)
        if isinstance(load, ExpertLoad) and load.num:
            means.append(load.total / load.num)
            most = max(most, load.most)
            module.token_dispatcher.load = ExpertLoad()  # type: ignore[union-attr]
    device = next(model.parameters()).device
    sums = torch.tensor([sum(means), float(len(means))], device=device)
    largest = torch.tensor(most, device=device)
    if groups.world.size() > 1:
        dist.all_reduce(sums, group=groups.world)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups.world)
    total, num = sums.tolist()
    return (total / num, float(largest)) if num else None
