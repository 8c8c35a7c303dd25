"""The profiler of a rank: which ranks and steps record, what they write, which configs cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.profiles import event_names
from verl.trainer.config import compose_config, load_config, resolve_config, validate_config
from verl.trainer.ppo.step_profiles import StepProfiles
from verl.utils.profiler import DistProfiler
from verl.workers.config import GlobalProfilerConfig
from verl.workers.config.profiler import ProfilerConfig

ENABLED = "actor_rollout_ref.actor.profiler.enable=True"
RUNNABLE = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "trainer.n_gpus_per_node=1")


def test_a_chosen_rank_writes_one_trace_a_recording_and_others_nothing(tmp_path: Path) -> None:
    general = GlobalProfilerConfig(tool="torch", steps=[3])
    config = ProfilerConfig(enable=True, ranks=[1])
    profilers = [DistProfiler(rank, config, general, "actor_rollout", "cpu", str(tmp_path)) for rank in (0, 1)]
    for profiler in profilers:
        profiler.start("step_3")
        with torch.profiler.record_function("update_actor"):
            torch.ones(4, 4) @ torch.ones(4, 4)
    assert profilers[0].stop() is None
    trace = tmp_path / "profile" / "step_3" / "actor_rollout_rank_1.json.gz"
    assert profilers[1].stop() == str(trace) and profilers[1].stop() is None
    assert {"update_actor", "aten::mm"} <= event_names(trace)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [trace]


@pytest.mark.parametrize(
    ("continuous", "expected"),
    [
        (False, ["start 3", "stop", "start 4", "stop", "start 6", "stop"]),
        (True, ["start 3", "stop", "start 6", "stop"]),
    ],
)
def test_steps_that_follow_one_another_share_a_trace_if_asked(continuous: bool, expected: list[str]) -> None:
    calls: list[str] = []

    class Group:
        def start_profile(self, name: str) -> None:
            calls.append(name.replace("step_", "start "))

        def stop_profile(self) -> list[Any]:
            calls.append("stop")
            return [None]

    observer = StepProfiles(GlobalProfilerConfig("torch", [3, 4, 6], continuous), [Group()])
    for step in range(1, 8):
        observer.before_step(step)
        observer.after_step(step)
    assert calls == expected


def test_ranks() -> None:
    assert not ProfilerConfig(ranks=[0]).takes(0)
    assert [ProfilerConfig(enable=True).takes(rank) for rank in (0, 1)] == [True, False]
    assert [ProfilerConfig(enable=True, ranks=[1, 2]).takes(rank) for rank in (0, 1)] == [False, True]
    assert ProfilerConfig(enable=True, all_ranks=True).takes(7)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("global_profiler.steps=[1]",), "the tool is None (global_profiler.tool); expected torch or npu"),
        (("global_profiler.tool=nsys", "global_profiler.steps=[1]"), "the tool is 'nsys'"),
        (("global_profiler.tool=npu", "global_profiler.steps=[1]", "trainer.device=cpu"), "torch profiles a cpu"),
    ],
)
def test_an_enabled_profiler_that_cannot_record_is_refused(given: tuple[str, ...], problem: str) -> None:
    assert problem in "\n".join(validate_config(load_config([*RUNNABLE, ENABLED, *given])))


def test_keys_of_a_profiler_that_is_off_are_reported_as_without_effect() -> None:
    given = [
        "global_profiler.tool=nsys",
        "global_profiler.steps=[1]",
        "actor_rollout_ref.actor.profiler.all_ranks=True",
    ]
    config, taken = resolve_config(compose_config([*RUNNABLE, *given]))
    assert validate_config(config) == [] and not config.is_profiled
    assert {item.key for item in taken if item.reason.startswith("no profiler is enabled")} == {
        text.partition("=")[0] for text in given
    }


def test_ranks_that_only_generate_are_profiled_like_those_that_train() -> None:
    profile = (ENABLED, "actor_rollout_ref.actor.profiler.ranks=[2]", "actor_rollout_ref.rollout.profiler.ranks=[0]")
    chosen = load_config([*RUNNABLE, *profile]).actor_rollout_ref.rollout.profiler
    assert chosen.enable and chosen.ranks == [0]


def test_a_recording_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    general = GlobalProfilerConfig(tool="torch", steps=[3])
    profiler = DistProfiler(0, ProfilerConfig(enable=True), general, "actor_rollout", "cpu", str(tmp_path))
    profiler.start("step_3")
    assert profiler.stop() is not None
    assert capfd.readouterr() == ("", "")
