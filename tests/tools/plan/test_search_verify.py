"""Which half of a layout is not tried again when its plan does not work."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from hf_formats.config import load_hf_config
from tests.mindspeed_llm.tiny import tiny_hf_config
from tests.tools.plan.truth_layouts import LAYOUTS, overrides_of
from tools.plan.devices import load_device
from tools.plan.search.verify import halves_at_fault
from tools.plan.setup import PlannedRun
from tools.plan.training import UPDATE, StepSize
from tools.plan.whole import WholePlan, plan_run
from verl.trainer.config import load_config

SIZE = StepSize(10, 8)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> WholePlan:
    """The plan of two stages, whose ranks share the experts of the rollout; one core plans all in this process."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(tiny_hf_config(num_hidden_layers=4)))
    world_size, overrides = LAYOUTS["pp2"]
    config = load_config(overrides_of(str(path), world_size, *overrides))
    device = load_device("cpu")
    run = PlannedRun("tiny", config, load_hf_config(str(path)), device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        return plan_run(run, SIZE, ends_when_full=True)


def without_calls(plan: WholePlan, name: str) -> WholePlan:
    """The last stage does not make those of one phase."""
    last = plan.stages[-1]
    calls = tuple(replace(phase, samples=()) if phase.phase == name else phase for phase in last.calls)
    return replace(plan, stages=(*plan.stages[:-1], replace(last, calls=calls)))


def test_the_half_whose_calls_do_not_fit_together(plan: WholePlan) -> None:
    assert halves_at_fault(plan) == (False, False)
    assert halves_at_fault(without_calls(plan, UPDATE)) == (True, False)
    assert halves_at_fault(without_calls(plan, "decode")) == (False, True)
    assert halves_at_fault(without_calls(plan, "weight_sync")) == (False, False)  # only of these two together


def test_the_half_that_is_too_full(plan: WholePlan) -> None:
    of_phase = {phase.name: phase.peak_bytes for rank in plan.stages for phase in rank.phases}
    most = max(of_phase[name] for name in ("prefill", "decode", "wake_kv_cache"))
    for memory_bytes, expected in ((1024, (True, True)), (most, (of_phase[UPDATE] > most, False))):
        device = replace(plan.run.device, memory_gib=memory_bytes / 2**30)
        assert halves_at_fault(replace(plan, run=replace(plan.run, device=device))) == expected


def test_the_first_rank_that_is_too_full_ends_it(plan: WholePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one core plans all ranks in this process
    small = replace(plan.run, device=replace(plan.run.device, memory_gib=1024 / 2**30))
    part = plan_run(small, SIZE, ends_when_full=True)
    assert [rank.rank for rank in part.stages] == [0] and not part.is_whole
    (problem,) = part.problems
    assert problem.startswith("rank 0 (stage 0) needs")
    assert halves_at_fault(part) == (True, True)
    assert plan.is_whole and plan.problems == () and [rank.rank for rank in plan.stages] == [0, 1]  # made alike
