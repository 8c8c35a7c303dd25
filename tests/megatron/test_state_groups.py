"""Process groups: membership, order and getters against the layout's arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

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
    assert groups.tp.rank() == members["tp"].index(groups.rank) == groups.coords.tp
    assert groups.pp.rank() == members["pp"].index(groups.rank) == groups.coords.pp
    assert groups.dp.rank() == members["dp"].index(groups.rank) == groups.coords.dp
    assert groups.ep.rank() == members["ep"].index(groups.rank) == groups.coords.ep
    assert groups.edp.rank() == members["edp"].index(groups.rank) == groups.coords.edp
    parallel_state.destroy_model_parallel()
    return members


def test_groups_of_tp2_pp2_ep2() -> None:
    members = run_ranks(_members, 4, 2, 2, 2)
    assert [m["tp"] for m in members] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m["pp"] for m in members] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [m["ep"] for m in members] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m["dp"] for m in members] == [m["edp"] for m in members] == [[0], [1], [2], [3]]
    assert all(m["mp"] == m["world"] == [0, 1, 2, 3] for m in members)


def _groups_left() -> int:
    before = len(dist.distributed_c10d._world.pg_names)
    if dist.get_rank() < 2:
        layout = ParallelLayout(2, 2)
        groups = parallel_state.initialize_from_layout(layout, num_other_ranks=1)
        assert dist.get_process_group_ranks(groups.world) == [0, 1]
        parallel_state.destroy_model_parallel()
    return len(dist.distributed_c10d._world.pg_names) - before


def test_no_group_is_left_where_some_ranks_do_not_train() -> None:
    assert run_ranks(_groups_left, 3) == [0, 0, 0]


def test_group_ranks_cover_256_dies_once_per_axis() -> None:
    layout = ParallelLayout(256, 4, 8, 1, 8)
    for axis, size in {"tp": 4, "pp": 8, "dp": 8, "ep": 8, "edp": 4, "mp": 32, "tp_dp_cp": 32}.items():
        groups = parallel_state.group_ranks(layout, axis)
        assert {len(ranks) for ranks in groups} == {size}
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(256))


def test_a_group_holds_the_ranks_that_differ_in_its_axes_only() -> None:
    layout = ParallelLayout(64, 2, 2, 4, expert_model_parallel_size=4, expert_tensor_parallel_size=2)
    for order in ("tp-cp-ep-dp-pp", "tp-ep-dp-cp-pp", "cp-tp-dp-ep-pp"):
        ordered = replace(layout, order=order)
        assert ordered.problems() == []
        for name, fixed in {
            "tp": ("cp", "dp", "pp"),
            "cp": ("tp", "dp", "pp"),
            "dp_cp": ("tp", "pp"),
            "pp": ("tp", "cp", "dp"),
            "ep": ("etp", "edp", "pp"),
            "etp": ("ep", "edp", "pp"),
            "etp_ep": ("edp", "pp"),
            "edp": ("etp", "ep", "pp"),
        }.items():
            for ranks in parallel_state.group_ranks(ordered, name):
                at = [ordered.coords(rank) for rank in ranks]
                assert len({tuple(getattr(c, axis) for axis in fixed) for c in at}) == 1, (order, name)
                assert len(ranks) == 64 // len(parallel_state.group_ranks(ordered, name))
                assert ranks == sorted(ranks)
    # Megatron's default order: TP neighbours first, then the ranks that share a sequence, then replicas, then stages.
    assert layout.coords(1).tp == layout.coords(2).cp == layout.coords(8).dp == layout.coords(32).pp == 1
    assert layout.coords(1).etp == layout.coords(2).ep == layout.coords(8).edp == 1


def test_a_layout_of_16384_ranks_is_made_in_one_process() -> None:
    """A fake backend: groups are made and looked at, nothing is sent."""
    layout = ParallelLayout(16384, 8, 16, 4, expert_model_parallel_size=64)
    dist.init_process_group("fake", rank=9000, world_size=16384, store=FakeStore())
    try:
        groups = parallel_state.initialize_from_layout(layout)
        for name in ("tp", "cp", "dp", "dp_cp", "pp", "ep", "edp", "mp"):
            members = dist.get_process_group_ranks(getattr(groups, name))
            assert 9000 in members
            assert members in parallel_state.group_ranks(layout, name)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_every_problem_of_a_layout_is_told() -> None:
    with one_process_world(), pytest.raises(ValueError, match="not a multiple of TP 3") as caught:
        parallel_state.initialize_model_parallel(
            3, context_parallel_size=2, expert_model_parallel_size=5, virtual_pipeline_model_parallel_size=2
        )
    assert "not a multiple of expert TP 1 x EP 5" in str(caught.value)
    assert "virtual_pipeline_model_parallel_size is 2 with PP 1" in str(caught.value)
    assert "order is 'tp-pp'" in ParallelLayout(order="tp-pp").problems()[0]
    assert "end it with pp" in ParallelLayout(8, 2, 2, order="tp-pp-cp-ep-dp").problems()[0]


@pytest.mark.parametrize(
    ("layout", "num_layers", "wanted"),
    [
        (ParallelLayout(2, 1, 2), 4, [(0, 1), (2, 3)]),
        (ParallelLayout(3, 1, 3, num_layer_list=(2, 1, 3)), 6, [(0, 1), (2,), (3, 4, 5)]),
        (ParallelLayout(3, 1, 3, num_layers_in_last_pipeline_stage=1), 5, [(0, 1), (2, 3), (4,)]),
        (ParallelLayout(2, 1, 2, virtual_pipeline_model_parallel_size=2), 8, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (ParallelLayout(2, 1, 2, noop_layers=(1, 7)), 6, [(0, 1, 2), (3, 4, 5)]),
        (
            ParallelLayout(2, 1, 2, virtual_pipeline_model_parallel_size=2, num_layer_list=(2, 4)),
            6,
            [(0, 3), (1, 2, 4, 5)],
        ),
    ],
)
def test_layers_of_the_stages(layout: ParallelLayout, num_layers: int, wanted: list[tuple[int, ...]]) -> None:
    assert layout.problems(num_layers) == []
    stages = range(layout.pipeline_model_parallel_size)
    assert [layout.stage_layers(stage, num_layers) for stage in stages] == wanted


def test_no_op_layers_leave_holes() -> None:
    layout = ParallelLayout(2, 1, 2, virtual_pipeline_model_parallel_size=2, noop_layers=(0, 5))
    assert layout.chunk_slots(0, 0, 6) == (None, 0)
    assert layout.chunk_slots(0, 1, 6) == (3, None)
    assert layout.chunk_slots(1, 1, 6) == (4, 5)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (ParallelLayout(2, 1, 2), "5 layers do not divide over pipeline_model_parallel_size 2"),
        (ParallelLayout(2, 1, 2, num_layer_list=(2, 2)), "num_layer_list 2,2 sums to 4; the model has 5 layers"),
        (ParallelLayout(2, 1, 2, num_layer_list=(2, 3), virtual_pipeline_model_parallel_size=2), "a stage of 3 layers"),
        (ParallelLayout(2, 1, 2, noop_layers=(6,)), "noop_layers [6] must be different numbers in 0..5"),
        (ParallelLayout(2, 1, 2, num_layers_in_first_pipeline_stage=5), "do not divide"),
    ],
)
def test_layers_that_do_not_fit_are_told(layout: ParallelLayout, said: str) -> None:
    assert said in "; ".join(layout.problems(num_layers=5))


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.barrier()


def test_launcher_reports_the_failing_rank() -> None:
    with pytest.raises(RuntimeError, match="the cause"):
        run_ranks(_fail_on_rank_1, 2, timeout_s=30)
