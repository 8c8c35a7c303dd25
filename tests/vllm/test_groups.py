"""Which ranks an engine's groups hold, for several instances of several replicas in one world."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.parallel.launcher import run_ranks
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import init_model_parallel

Members = dict[str, list[int]]


def members(configs: list[ParallelConfig]) -> list[Members]:
    """The world ranks of this rank's groups, by what the groups gather."""
    found = []
    for config in configs:
        parallel = init_model_parallel(replace(config, rank=dist.get_rank()))
        mine = torch.tensor([dist.get_rank()])
        groups = {"tp": parallel.tp, "dp": parallel.dp, "ep": parallel.ep, "exchange": parallel.exchange}
        found.append({name: group.all_gather(mine).flatten().tolist() for name, group in groups.items()})
        parallel.destroy()
    return found


def layout(tp: int, dp: int, exchange: str = "all_gather") -> ParallelConfig:
    return ParallelConfig(tp, dp, True, rank=0, world_size=4, expert_exchange=exchange)


@pytest.fixture(scope="module")
def by_rank() -> list[list[Members]]:
    return run_ranks(members, 4, [layout(1, 2), layout(2, 2, "dispatch"), layout(2, 1)])


def test_replicas_of_an_instance_share_its_experts(by_rank: list[list[Members]]) -> None:
    """VLLM_DP_SIZE=2 in a world of four: two instances of two replicas."""
    for rank, (found, _, _) in enumerate(by_rank):
        instance = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found == {"tp": [rank], "dp": instance, "ep": instance, "exchange": [rank]}


def test_replicas_of_several_ranks(by_rank: list[list[Members]]) -> None:
    for rank, (_, found, _) in enumerate(by_rank):
        replica = [rank // 2 * 2, rank // 2 * 2 + 1]
        everyone = [0, 1, 2, 3]
        assert found == {"tp": replica, "dp": [rank % 2, rank % 2 + 2], "ep": everyone, "exchange": everyone}


def test_replicas_alone(by_rank: list[list[Members]]) -> None:
    for rank, (_, _, found) in enumerate(by_rank):
        replica = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found == {"tp": replica, "dp": [rank], "ep": replica, "exchange": [rank]}
