"""Process groups: membership, order and getters against the layout's arithmetic."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.parallel_layout import ParallelLayout
from tests.megatron.model_helpers import one_process_world
from tests.parallel.launcher import run_ranks


def _members(tp: int, pp: int, ep: int) -> dict[str, list[int]]:
    groups = parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    members = {
        axis: dist.get_process_group_ranks(getattr(groups, axis))
        for axis in ("tp", "pp", "dp", "ep", "edp", "mp", "world")
    }
    total = torch.ones(1)
    dist.all_reduce(total, group=groups.mp)
    assert total.item() == tp * pp
    assert groups.rank == dist.get_rank()
    assert groups.coords == groups.layout.coords(groups.rank)
    assert parallel_state.get_tensor_model_parallel_rank() == members["tp"].index(groups.rank) == groups.coords.tp
    assert parallel_state.get_pipeline_model_parallel_rank() == members["pp"].index(groups.rank) == groups.coords.pp
    assert parallel_state.get_data_parallel_rank() == members["dp"].index(groups.rank) == groups.coords.dp
    assert parallel_state.get_expert_model_parallel_rank() == members["ep"].index(groups.rank) == groups.coords.ep
    assert parallel_state.get_expert_data_parallel_rank() == members["edp"].index(groups.rank) == groups.coords.edp
    parallel_state.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()
    return members


def test_groups_of_tp2_pp2_ep2() -> None:
    members = run_ranks(_members, 4, 2, 2, 2)
    assert [m["tp"] for m in members] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m["pp"] for m in members] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [m["ep"] for m in members] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m["dp"] for m in members] == [m["edp"] for m in members] == [[0], [1], [2], [3]]
    assert all(m["mp"] == m["world"] == [0, 1, 2, 3] for m in members)


def test_group_ranks_cover_256_dies_once_per_axis() -> None:
    layout = ParallelLayout(256, 4, 8, 1, 8)
    for axis, size in {"tp": 4, "pp": 8, "dp": 8, "ep": 8, "edp": 4, "mp": 32}.items():
        groups = parallel_state.group_ranks(layout, axis)
        assert {len(ranks) for ranks in groups} == {size}
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(256))


def test_every_problem_of_a_layout_is_told() -> None:
    with one_process_world(), pytest.raises(ValueError, match="context_parallel_size is 2") as caught:
        parallel_state.initialize_model_parallel(3, context_parallel_size=2, expert_tensor_parallel_size=2)
    assert "not a multiple of TP 3" in str(caught.value)
    assert "expert_tensor_parallel_size is 2" in str(caught.value)


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def test_launcher_reports_the_failing_rank() -> None:
    with pytest.raises(RuntimeError, match="the cause"):
        run_ranks(_fail_on_rank_1, 2, timeout_s=30)
