"""The exchange of experts of NVIDIA devices gives what the reference's gives; layouts are in test_parallel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.launcher import run_ranks
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops import reference
from vllm.ops.cuda import exchange

ROWS, HIDDEN, WIDTH, TOPK = 5, 24, 16, 3
REFERENCE = reference.rollout_ops()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def exchange_both_ways(num_here: int, most_gathered: int) -> list[tuple[Tensor, Tensor]]:
    """(found, expected) of this rank's active rows in each dtype; the other rows are finite."""
    exchange.MOST_GATHERED_TOKENS = most_gathered
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = GroupCoordinator(rank, num_ranks, dist.group.WORLD)
    torch.manual_seed(rank)
    num_active = ROWS - rank % 3
    results = []
    for dtype in TOLERANCE:
        x, w13, w2 = (
            torch.randn(*shape).to(dtype)
            for shape in ((ROWS, HIDDEN), (num_here, 2 * WIDTH, HIDDEN), (num_here, HIDDEN, WIDTH))
        )
        ids = torch.stack([torch.randperm(num_ranks * num_here)[:TOPK] for _ in range(ROWS)])
        given = x, w13, w2, torch.rand(ROWS, TOPK), ids, num_active, group
        found = exchange.exchanged_experts(*given, experts=REFERENCE.fused_experts)
        assert found.shape == x.shape and found.dtype is dtype and found.isfinite().all()
        results.append((found[:num_active], REFERENCE.exchanged_experts(*given)[:num_active]))
    return results


@pytest.mark.parametrize(
    ("num_ranks", "num_here", "most_gathered"),
    [(2, 4, 10), (4, 2, 20), (2, 4, 9)],
    ids=["gathered", "fewer experts here than choices of a token", "too many tokens"],
)
def test_ranks_get_what_the_reference_gives(num_ranks: int, num_here: int, most_gathered: int) -> None:
    for results in run_ranks(exchange_both_ways, num_ranks, num_here, most_gathered, timeout_s=60):
        for found, expected in results:
            gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
            assert gap <= TOLERANCE[expected.dtype]
            assert most_gathered >= num_ranks * ROWS or torch.equal(found, expected)
