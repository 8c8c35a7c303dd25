"""Restarts of dead workers: when, from where, how often; on a real Ray with the smallest policy."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.manifest import Manifest, write_manifest
from megatron.core.parallel_layout import ParallelLayout
from tests.pages import undocumented
from tests.verl.bandit import bandit_config, run_bandit, write_inputs
from tests.verl.failing_bandit import run_failing
from verl.trainer.config import validate_config
from verl.trainer.config.override_text import override
from verl.trainer.ppo import checkpointing
from verl.trainer.ppo.recovery import RestartLimit, RestartPoints, TrainingStoppedError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    return tmp_path


def _metrics(root: Path) -> list[dict[str, Any]]:
    lines = (root / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("timing", "perf/t", "perf/restarts"))}
        for line in lines
    ]


def _files(root: Path, folder: str) -> dict[str, list[dict[str, Any]]]:
    """Lines of every file, without clocks."""
    return {
        path.name: [
            {k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()
        ]
        for path in (root / folder).iterdir()
    }


@pytest.mark.timeout(240)
@pytest.mark.parametrize("steps", [(2, 5, 6), pytest.param((2, 4, 5, 6), marks=pytest.mark.slow)])
def test_a_run_whose_workers_die_ends_as_an_undisturbed_one(
    local_ray: None,
    root: Path,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    steps: tuple[int, ...],
) -> None:
    """Deaths before the first checkpoint, and several behind one in different steps, of which one is the last."""
    whole = tmp_path_factory.mktemp("whole")
    write_inputs(whole)
    more = ("trainer.log_samples_freq=1", "trainer.save_freq=3")
    run_bandit(bandit_config(whole, *more))
    failures = root / "failures"
    failures.mkdir()
    for step in steps:
        (failures / str(step)).write_text("die 1")
    with caplog.at_level(logging.INFO):
        trainers = run_failing(bandit_config(root, *more), failures)
    assert len(trainers) == len(steps) + 1 and not any(failures.iterdir())
    assert _metrics(root) == _metrics(whole) and len(_metrics(root)) == 7
    for folder in ("reward_ledger", "samples", "val_generations"):
        assert _files(root, folder) == _files(whole, folder), folder
    for path in ("export_hf/best_digit", "checkpoints/global_step_6/data.json"):
        assert (root / path).read_bytes() == (whole / path).read_bytes()
    restarts = [json.loads(line) for line in (root / "restarts.jsonl").read_text().splitlines()]
    assert [(line["step"], line["from_step"]) for line in restarts] == [(2, 0), *((step, 3) for step in steps[1:])]
    assert all("died during update_actor" in line["cause"] for line in restarts)
    logged = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("perf/restarts") for row in logged] == [None, 1, 1, 1, *[len(steps)] * 3]
    assert undocumented(name for row in logged for name in row) == []
    assert "going back to the model's weights" in caplog.text and "resumed after step 3 from" in caplog.text


@pytest.mark.timeout(240)
def test_a_crash_loop_ends_and_an_exception_is_not_repeated(local_ray: None, root: Path) -> None:
    failures = root / "failures"
    failures.mkdir()
    (failures / "3").write_text("die 9")
    with pytest.raises(TrainingStoppedError, match="during update_actor.*\n.*died twice in step 3 without") as stop:
        run_failing(bandit_config(root), failures)
    assert stop.value.step == 3 and (failures / "3").read_text() == "die 7"
    (failures / "3").write_text("raise 9")
    with pytest.raises(TrainingStoppedError, match="KeyError: 'bad data'"):
        run_failing(bandit_config(root), failures)
    assert (failures / "3").read_text() == "raise 8"
    (failures / "3").write_text("die 9")
    with pytest.raises(TrainingStoppedError, match=r"died during update_actor"):
        run_failing(bandit_config(root, "trainer.max_restarts=0"), failures)
    assert (failures / "3").read_text() == "die 8"
    (failures / "3").unlink()
    run_failing(bandit_config(root), failures)
    assert len((root / "restarts.jsonl").read_text().splitlines()) == 1


@pytest.mark.timeout(120)
def test_missing_room_is_told_with_what_is_missing(local_ray: None, root: Path) -> None:
    config = bandit_config(root, "trainer.start_timeout_s=1", "ray_kwargs.num_cpus_per_worker=3")
    with pytest.raises(ValueError, match="no room for .* after 1.0 s; missing: 2 CPU; Ray has .* on 1 nodes"):
        run_failing(config, root)


def test_a_limit_counts_since_the_newest_checkpoint() -> None:
    limit = RestartLimit(2)
    assert limit.refusal(3, 0) is None and limit.refusal(4, 0) is None
    assert limit.refusal(4, 4) is None, "progress"
    assert limit.refusal(6, 4) is None
    assert "died 3 times without a new checkpoint in between, in steps [4, 6, 5]" in str(limit.refusal(5, 4))
    assert "died twice in step 6" in str(limit.refusal(6, 4))
    start = RestartLimit(5)
    assert start.refusal(0, 0) is None and "twice before its first step" in str(start.refusal(0, 0))


def _write_checkpoint(root: Path, step: int) -> checkpointing.Checkpoint:
    checkpoint = checkpointing.checkpoint_at(str(root / "checkpoints"), step)
    checkpoint.write_state({"loader": {}, "kl_coef": 0.0})
    checkpoint.actor.mkdir(exist_ok=True)
    write_manifest(checkpoint.actor, Manifest(ParallelLayout(world_size=1), {}))
    return checkpoint


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_a_restart_takes_the_newest_checkpoint(root: Path, mode: str) -> None:
    config = bandit_config(root, f"trainer.resume_mode={mode}")
    points = RestartPoints(config)
    assert points.newest() is None
    newest = [_write_checkpoint(root, step) for step in (2, 4)][-1]
    assert points.newest() == newest
    assert points.resuming(config).trainer.resume_mode == "auto"


def test_a_run_from_a_path_does_not_go_on_from_another_training_s_checkpoints(root: Path) -> None:
    start, later = _write_checkpoint(root, 2), _write_checkpoint(root, 4)
    asked = ("trainer.resume_mode=resume_path", override("trainer.resume_from_path", start.directory))
    config = bandit_config(root, *asked)
    points = RestartPoints(config)
    assert points.newest() == start and points.resuming(config) == config
    own = _write_checkpoint(root, 3)
    assert points.resuming(config).trainer.resume_from_path == str(own.directory)
    _write_checkpoint(root, 4)  # its own now
    assert points.newest() == later


def test_impossible_limits_are_told(root: Path) -> None:
    problems = "\n".join(validate_config(bandit_config(root, "trainer.max_restarts=-1", "trainer.start_timeout_s=0")))
    assert "trainer.max_restarts is -1" in problems and "trainer.start_timeout_s is 0.0" in problems
