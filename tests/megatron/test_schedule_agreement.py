"""Ranks whose micro-batches differ say so, all of them, with ranks and numbers, before anything can hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.agreement import disagreements
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import HIDDEN, toy_batches, toy_config, toy_forward_step, toy_stage


def _run(groups: ProcessGroups, sizes: list[int], announced: list[int] | None = None, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "forward_step_func": toy_forward_step,
        "data_iterator": iter(toy_batches(sizes)),
        "model": toy_stage(groups, toy_config(), 4),
        "tensor_shapes": [(size, HIDDEN) for size in announced or sizes],
    }
    get_forward_backward_func(groups)(**(arguments | changes))


def _two_stages_disagree() -> None:
    for num_chunks in (1, 2):
        groups = initialize_model_parallel(1, 2, num_chunks)
        first = groups.is_first_stage
        with pytest.raises(ValueError, match="differ between ranks: rank 0 has 3 micro-batches, rank 1 has 2 micro-"):
            _run(groups, [3, 2, 4] if first else [3, 2])
        with pytest.raises(ValueError, match=r"micro-batch 1 is \(2, 12\) on rank 0 and \(5, 12\) on rank 1"):
            _run(groups, [3, 2, 4] if first else [3, 5, 4])
        with pytest.raises(ValueError, match="rank 0 has forward_only True, rank 1 has forward_only False"):
            _run(groups, [3, 2], forward_only=first)
        _run(groups, [3, 2, 1])
        destroy_model_parallel()


def _two_replicas_differ(is_mean: bool) -> None:
    groups = initialize_model_parallel()
    model = toy_stage(groups, toy_config(calculate_per_token_loss=not is_mean), 4)
    _run(groups, [3, 2, 4] if groups.rank == 0 else [3, 2], model=model)


def test_stages_that_disagree_raise_with_both_numbers() -> None:
    run_ranks(_two_stages_disagree, 2, timeout_s=60)


def test_replicas_may_differ_unless_losses_are_means() -> None:
    run_ranks(_two_replicas_differ, 2, False, timeout_s=60)
    with pytest.raises(RuntimeError, match="rank 0 has 3 micro-batches, rank 1 has 2 micro-batches"):
        run_ranks(_two_replicas_differ, 2, True, timeout_s=60)


def test_ranks_that_share_experts_need_the_same_number_and_not_the_same_shapes() -> None:
    layout = ParallelLayout(world_size=8, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    table = torch.tensor([[3, 0, rank % 4] for rank in range(8)])
    assert disagreements(layout, table, is_mean=False) == []
    table[[3, 7], 0] = 2  # replica 3, which shares experts with replica 2
    found = disagreements(layout, table, is_mean=False)
    assert found == ["rank 2 has 3 micro-batches, rank 3 has 2 micro-batches", found[1]] and "rank 7" in found[1]
    table[[2, 6], 0] = 2
    assert disagreements(layout, table, is_mean=False) == []
    assert disagreements(layout, table, is_mean=True)[0] == "rank 0 has 3 micro-batches, rank 2 has 2 micro-batches"


def test_sixteen_thousand_ranks_are_compared_in_no_time() -> None:
    layout = ParallelLayout(16384, 4, 8, 2, 32)
    table = torch.tensor([[5, 0, 7]]).repeat(16384, 1)
    disagreements(layout, table, is_mean=False)  # makes the groups
    table[9999, 0] = 4
    start = time.perf_counter()
    found = disagreements(layout, table, is_mean=False)
    assert time.perf_counter() - start < 0.1
    assert any("rank 9999 has 4" in sentence for sentence in found)


def test_what_a_stage_makes_must_be_what_was_announced() -> None:
    with pytest.raises(RuntimeError, match=r"micro-batch 1: the output of chunk 0 of this stage is \(2, 12\); "):
        run_ranks(_announce_another_shape, 2, timeout_s=60)


def _announce_another_shape() -> None:
    _run(initialize_model_parallel(1, 2), [3, 2], announced=[3, 4])


def test_too_few_batches_are_named(one_rank: ProcessGroups) -> None:
    with pytest.raises(ValueError, match="data_iterator ended after 2 micro-batches; tensor_shapes announced 3"):
        _run(one_rank, [3, 2], announced=[3, 2, 4])
