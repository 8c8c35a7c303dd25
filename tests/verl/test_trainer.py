"""The training loop on a real Ray with the smallest policy: it learns, survives kills, and resumes to the same run."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tests.pages import undocumented
from tests.verl.bandit import RIGHT_DIGIT, bandit_config, run_bandit, write_inputs
from verl.single_controller.base import Worker, WorkerDiedError
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.schedules.synchronous import SynchronousSource
from verl.utils.rank_log import LOG_DIR
from verl.utils.tokenizer import hf_tokenizer

WAIT_S = 120.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    return tmp_path


def _metrics(root: Path) -> list[dict[str, Any]]:
    """What must be equal between runs: all but clocks."""
    lines = (root / "metrics.jsonl").read_text().splitlines()
    clocks = ("timing", "perf/time_per_step", "perf/throughput")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(clocks)} for line in lines]


def _ledger(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines of every file of the reward ledger, without their clocks."""
    files = (root / "reward_ledger").iterdir()
    lines = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in files}
    return {name: [{k: v for k, v in line.items() if k != "seconds"} for line in rows] for name, rows in lines.items()}


def _wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        time.sleep(0.02)


def _workers() -> list[int]:
    """The processes of this test's ranks, by the name that Ray gives them."""
    processes = psutil.Process().children(recursive=True)
    return [process.pid for process in processes if process.name().startswith("ray::WorkerPro")]


def _has_step(root: Path, step: int) -> bool:
    file = root / "metrics.jsonl"
    return file.is_file() and f'"step": {step},' in file.read_text()


@pytest.mark.timeout(240)
def test_a_run_whose_worker_was_killed_resumes_to_the_metrics_of_an_undisturbed_one(
    local_ray: None, root: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tmp_path_factory.mktemp("whole")
    write_inputs(whole)
    run_bandit(bandit_config(whole))
    expected = _metrics(whole)
    assert [record["step"] for record in expected] == list(range(7))
    assert undocumented(name for record in expected for name in record) == []
    scores = [record["val/score"] for record in expected if "val/score" in record]
    assert len(scores) == 3 and scores[-1] > scores[0]
    assert (whole / "export_hf" / "best_digit").read_text() == str(RIGHT_DIGIT)
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == [
        "global_step_4",
        "global_step_6",
        "latest_checkpointed_iteration.txt",
    ]
    shown = json.loads((whole / "val_generations" / "step_6.jsonl").read_text().splitlines()[0])
    assert shown["ground_truth"] == str(RIGHT_DIGIT) and {"prompt", "response", "score"} <= shown.keys()

    killed_at: list[float] = []

    def kill_one_worker() -> None:
        _wait_until(lambda: _has_step(root, 3), "step 3")
        killed_at.append(time.monotonic())
        os.kill(_workers()[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill_one_worker)
    killer.start()
    with pytest.raises(WorkerDiedError, match=r"rank \d \(pid \d+ on .*\) died during"):
        run_bandit(bandit_config(root, "trainer.total_training_steps=1000"))
    killer.join(timeout=WAIT_S)
    assert time.monotonic() - killed_at[0] < 30
    with caplog.at_level(logging.INFO):
        run_bandit(bandit_config(root))
    assert "resumed after step" in caplog.text and "nothing is left" not in caplog.text
    run_bandit(bandit_config(root))
    assert "nothing is left to train: 6 of 6 steps are done; give more steps" in caplog.text
    assert _metrics(root) == expected
    ledger = _ledger(whole)
    assert sorted(ledger) == sorted(
        [f"step_{n}.jsonl" for n in range(1, 7)] + [f"val_step_{n}.jsonl" for n in (0, 3, 6)]
    )
    assert _ledger(root) == ledger
    assert len({line["uid"] for line in ledger["step_6.jsonl"]}) == 4 and len(ledger["step_6.jsonl"]) == 32


FILTERED = ("algorithm.filter_groups={enable:True,metric:accuracy}", "data.gen_batch_size=3")


@pytest.mark.timeout(240)
def test_dynamic_sampling_generates_until_enough_groups_differ_and_resumes_to_the_same_run(
    local_ray: None, root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path_factory.mktemp("whole")
    write_inputs(whole)
    run_bandit(bandit_config(whole, *FILTERED, "trainer.total_training_steps=4"))
    expected = _metrics(whole)
    steps = [record for record in expected if record["step"]]
    assert max(record["train/num_gen_batches"] for record in steps) >= 2
    assert any(record["train/dropped_surplus_groups"] > 0 for record in steps)
    for record in steps:
        assert record["critic/score/min"] == 0.0 < record["critic/score/mean"] < record["critic/score/max"] == 1.0
        assert record["train/kept_groups_ratio"] < 1 or record["train/num_gen_batches"] == 2
    keeping = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", "trainer.keep_every_steps=2")
    monkeypatch.setenv(LOG_DIR, str(root / "logs"))
    for total in (2, 4):
        steps_and_tests = (f"trainer.total_training_steps={total}", "trainer.test_freq=4")
        run_bandit(bandit_config(root, *FILTERED, *steps_and_tests, *keeping))
    assert sorted(path.name for path in (root / "checkpoints").glob("global_step_*")) == [
        "global_step_2",  # kept for good, by a resumed run too; 1 and 3 went
        "global_step_4",
    ]
    assert (root / "logs" / "rank_0.log").read_text().count("rank 0 of 1 on ") == 2
    resumed = _metrics(root)
    assert [record["step"] for record in resumed] == list(range(5))
    for ours, theirs in zip(resumed, expected, strict=True):
        assert {k: v for k, v in ours.items() if not k.startswith("val")} == {
            k: v for k, v in theirs.items() if not k.startswith("val")
        }


@pytest.mark.slow  # tests/verl/test_run_changes.py has the record without a run
@pytest.mark.timeout(240)
def test_a_resume_with_another_algorithm_is_written_down(local_ray: None, root: Path) -> None:
    run_bandit(bandit_config(root, "trainer.total_training_steps=2"))
    run_bandit(bandit_config(root, "trainer.total_training_steps=3"))
    assert not (root / "changes.jsonl").exists()
    run_bandit(bandit_config(root, "trainer.total_training_steps=4", "algorithm.adv_estimator=rloo"))
    change = {"key": "algorithm.adv_estimator", "was": "grpo", "now": "rloo"}
    assert json.loads((root / "changes.jsonl").read_text()) == {"step": 4, "changes": [change]}


@pytest.mark.timeout(240)
def test_evaluation_sets_have_metrics_of_their_own_and_the_end_can_be_left_out(local_ray: None, root: Path) -> None:
    rows = pq.read_table(root / "data.parquet")
    pq.write_table(rows.slice(0, 3), root / "few.parquet")
    sets = f"data.val_files={{all:{root / 'data.parquet'},few:{root / 'few.parquet'}}}"
    length = ("trainer.total_training_steps=1", "trainer.log_val_generations=2", "trainer.export_hf=False")
    run_bandit(bandit_config(root, sets, *length, "trainer.save_last=False", "trainer.test_last=False"))
    first, last = _metrics(root)
    assert (16 * first["val/all/score"] + 3 * first["val/few/score"]) / 19 == pytest.approx(first["val/score"])
    assert {"val/few/accuracy", "val/few/response_length", "val-core/digits/reward/mean@1"} <= first.keys()
    shown = [json.loads(line) for line in (root / "val_generations" / "step_0.jsonl").read_text().splitlines()]
    assert [record["set"] for record in shown] == ["all", "all", "few", "few"]
    assert [record["prompt"] for record in shown[:2]] == [record["prompt"] for record in shown[2:]]
    assert [record["response"] for record in shown[:2]] == [record["response"] for record in shown[2:]]
    assert not any(key.startswith("val") for key in last)
    assert not (root / "checkpoints").exists()
    only = tuple(f"trainer.{key}" for key in ("val_only=True", f"report_dir={root / 'only'}"))
    run_bandit(bandit_config(root, sets, *length, *only))
    (validated,) = _metrics(root / "only")
    assert validated["val/score"] == first["val/score"] and not (root / "checkpoints").exists()


def test_prompts_sampled_again_in_a_step_get_other_seeds_and_the_same_in_every_run(root: Path) -> None:
    config = bandit_config(root, *FILTERED, "data.shuffle=False")
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    seen = []
    for _ in range(2):
        trainer = RayPPOTrainer(config, tokenizer, Worker, None)  # type: ignore[arg-type]
        source = trainer._make_source()
        assert isinstance(source, SynchronousSource)
        prompts = [source.next_prompts(0, generation) for generation in range(12)]  # the data twice over
        seen.append(
            [(p.non_tensor_batch["uid"].tolist(), p.non_tensor_batch["sampling_seeds"].tolist()) for p in prompts]
        )
        uids, seeds = ([value for part in seen[-1] for value in part[place]] for place in (0, 1))
        assert len(set(uids)) == 12 * 3 and len(set(seeds)) == len(seeds) == 12 * 3 * 8
    assert seen[0] == seen[1]


@pytest.mark.slow  # tests/system has it for the whole job; this is the bare command, with a Ray of its own
@pytest.mark.timeout(200)
def test_workers_graders_and_ray_end_with_a_killed_driver(root: Path) -> None:
    command = [sys.executable, "-m", "tests.verl.bandit", str(root), "trainer.total_training_steps=100000"]
    with (root / "log").open("w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until(lambda: _has_step(root, 2) or driver.poll() is not None, "step 2")
        assert driver.poll() is None, (root / "log").read_text()
        family = psutil.Process(driver.pid).children(recursive=True)
        # Ray's two node agents hold nothing of the run and end by themselves some minutes after their raylet.
        agents = [process for process in family if process.name().endswith("Agent")]
        watched = [process for process in family if process not in agents]
        assert any("scoring_worker" in " ".join(process.cmdline()) for process in watched)
    finally:
        driver.kill()
        driver.wait()
    _, alive = psutil.wait_procs(watched, timeout=30)
    for agent in agents:
        if agent.is_running():
            agent.kill()
    assert not alive, [process.name() for process in alive]
