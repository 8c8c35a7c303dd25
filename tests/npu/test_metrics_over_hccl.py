"""What training reports is summed in float64 on every device, also where the collectives reduce none."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.parallel.launcher import run_ranks
from verl.utils.megatron.reduce import reduce_over

EXACT_IN_FLOAT64_ONLY = 2.0**24 + 1.0


def _both_ways() -> tuple[list[float], list[float]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    mine, device = torch.tensor([EXACT_IN_FLOAT64_ONLY, -float(rank)], dtype=torch.float64), torch.device("npu")
    summed = reduce_over(mine, group, dist.ReduceOp.SUM, device)
    largest = reduce_over(mine, group, dist.ReduceOp.MAX, device)
    return summed.tolist(), largest.tolist()


def test_float64_sums_and_maxima_over_hccl() -> None:
    for summed, largest in run_ranks(_both_ways, 2, device="npu"):
        assert summed == [2 * EXACT_IN_FLOAT64_ONLY, -1.0]
        assert largest == [EXACT_IN_FLOAT64_ONLY, 0.0]
