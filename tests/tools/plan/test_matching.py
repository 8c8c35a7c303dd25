"""Calls that do not match are reported with rank, phase and operation."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.core.parallel_layout import ParallelLayout
from tests.mindspeed_llm.tiny import tiny_hf_config
from tests.tools.plan.truth_layouts import LAYOUTS, overrides_of
from tools.plan.collectives import Collective
from tools.plan.devices import load_device
from tools.plan.matching import Phase, problems
from tools.plan.rank_plan import plan_rank
from tools.plan.setup import planned_run
from tools.plan.training import StepSize
from tools.plan.whole import slow_groups
from verl.trainer.config import load_config

Calls = dict[int, list[Phase]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(tiny_hf_config(num_hidden_layers=4)))
    return path


@pytest.fixture(scope="module")
def planned(model_dir: Path) -> Calls:
    """Every rank of 4: TP2 PP2, experts over both."""
    world_size, overrides = LAYOUTS["tp2_pp2_uneven_ep2"]
    config = load_config(overrides_of(str(model_dir), world_size, *overrides))
    device, size = load_device("cpu"), StepSize(10, 8)
    return {
        rank: [
            Phase(calls.phase, sample)
            for calls in plan_rank(config, device, rank, size).calls
            for sample in calls.samples
        ]
        for rank in range(config.trainer.world_size)
    }


def _changed(planned: Calls, rank: int, phase: str, change: object) -> Calls:
    """``planned`` with ``change(calls)`` in one phase of one rank."""
    of_rank = [replace(p, calls=tuple(change(list(p.calls)))) if p.name == phase else p for p in planned[rank]]  # type: ignore[operator]
    return planned | {rank: of_rank}


def test_the_plan_of_a_run_fits_together(planned: Calls) -> None:
    assert problems(planned) == []
    assert {phase.name for phase in planned[0]} >= {"weight_sync", "decode", "compute_ref_log_prob", "update_actor"}


def test_a_micro_batch_too_many_is_found(planned: Calls) -> None:
    def once_more(calls: list[Collective]) -> list[Collective]:
        at = next(i for i, call in enumerate(calls) if call.kind == "recv")
        return calls[: at + 20] + calls[at:]

    (first, *_) = problems(_changed(planned, 2, "update_actor", once_more))
    assert "update_actor" in first
    assert "rank" in first


def test_groups_in_another_order_are_found(planned: Calls) -> None:
    def swapped(calls: list[Collective]) -> list[Collective]:
        at = next(i for i, (a, b) in enumerate(pairwise(calls)) if a.ranks != b.ranks and not {a.peer, b.peer} - {-1})
        return [*calls[:at], calls[at + 1], calls[at], *calls[at + 2 :]]

    (first, *_) = problems(_changed(planned, 1, "update_actor", swapped))
    assert "rank" in first
    assert "update_actor" in first


def test_a_send_without_its_receive_is_found(planned: Calls) -> None:
    def without_last_receive(calls: list[Collective]) -> list[Collective]:
        at = max(i for i, call in enumerate(calls) if call.kind == "recv")
        return calls[:at] + calls[at + 1 :]

    (first, *_) = problems(_changed(planned, 2, "compute_ref_log_prob", without_last_receive))
    assert "send" in first or "recv" in first
    assert "compute_ref_log_prob" in first


def test_receives_in_a_circle_are_found() -> None:
    def recv(rank: int, peer: int) -> Collective:
        return Collective("recv", "pp", (0, 1), "float32", 0, 8, None, peer)

    def send(rank: int, peer: int) -> Collective:
        return Collective("send", "pp", (0, 1), "float32", 8, 0, None, peer)

    between = Collective("all_reduce", "pp", (0, 1), "float32", 1, 1, None, -1)
    together = {0: [Phase("x", (recv(0, 1), send(0, 1)))], 1: [Phase("x", (recv(1, 0), send(1, 0)))]}
    assert problems(together) == []  # posted at once
    lonely = {0: [Phase("x", (recv(0, 1), between, send(0, 1)))], 1: [Phase("x", (recv(1, 0), between, send(1, 0)))]}
    assert "waits for ever in recv" in problems(lonely)[0]


def test_sizes_that_differ_are_found(planned: Calls) -> None:
    def longer(calls: list[Collective]) -> list[Collective]:
        at = next(i for i, call in enumerate(calls) if call.kind == "all_reduce")
        call = calls[at]
        return [*calls[:at], call._replace(sent=call.sent + 1, received=call.received + 1), *calls[at + 1 :]]

    (first, *_) = problems(_changed(planned, 0, "update_actor", longer))
    assert first.startswith("rank 0, update_actor: all_reduce")


def test_tensor_parallelism_beyond_a_node_is_reported() -> None:
    device = load_device("h100")
    run = planned_run("deepseek_v3_671b_128gpu", [], device, nodes=None, model=None)
    (warning,) = slow_groups(run)
    assert warning.startswith("rollout.tensor_model_parallel_size is 32: the all_reduces of rank 0's group in decode")


def test_layer_lists_that_do_not_sum_are_found() -> None:
    layout = ParallelLayout(world_size=8, pipeline_model_parallel_size=8, num_layer_list=(7, 7, 8, 8, 8, 8, 8, 8))
    (problem,) = layout.problems(num_layers=61)
    assert "sums to 62; the model has 61 layers" in problem
