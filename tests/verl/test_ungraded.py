"""A step or a validation without grades stops the run, and a ground truth reaches its function as it was written."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.verl.bandit import bandit_config, run_bandit, write_inputs
from verl.protocol import DataProto
from verl.trainer.ppo.ungraded import UngradedLimit
from verl.utils.reward_score.functions import RewardFunctionSpec
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool, ScoringResult
from verl.workers.reward_manager import GradedSample
from verl.workers.reward_manager.pooled import grading_jobs


def _samples(num_good: int, num_bad: int) -> list[GradedSample]:
    job = ScoringJob("sums", "answer", "4", {})
    bad = ScoringResult({"score": 0.0}, "error", "KeyError: 'level'", function=RewardFunctionSpec("r.py", "grade"))
    good = ScoringResult({"score": 1.0})
    return [GradedSample("0", "", job, result) for result in [good] * num_good + [bad] * num_bad]


def test_all_or_more_than_the_share_stop_the_run() -> None:
    for ratio, num_good, num_bad, stops in (
        (0.5, 8, 0, False),
        (0.5, 4, 4, False),
        (0.5, 3, 5, True),
        (0.0, 7, 1, True),
        (1.0, 1, 7, False),
        (1.0, 0, 8, True),
    ):
        limit = UngradedLimit(ratio, 8)
        if not stops:
            limit.add(_samples(num_good, num_bad))
            continue
        with pytest.raises(ValueError, match=f"{num_bad} of 8 samples of a step .* in grade of r.py: error: KeyError"):
            limit.add(_samples(num_good, num_bad))


def test_groups_that_are_graded_one_by_one_count_together() -> None:
    limit = UngradedLimit(0.5, 8)
    limit.add(_samples(0, 4))
    limit.add(_samples(4, 0))
    limit.add(_samples(0, 4))
    with pytest.raises(ValueError, match="6 of 8 samples"):
        limit.add(_samples(2, 2))


TRUTHS: list[Any] = [{"answers": ["4", "four"], "unit": {"name": "m"}}, ["4", 4], 4, 4.0, True, "4", None, {}, [], 0.1]


def test_ground_truths_reach_their_jobs_as_they_are_and_differ_in_the_cache() -> None:
    given = [*TRUTHS, np.array([1, 2]), np.float32(0.5), np.int64(3), {"a": np.array(["x", None], dtype=object)}]
    given += [{1: np.bool_(True)}, datetime.date(2026, 1, 2), (1, 2)]
    plain = [*TRUTHS, [1, 2], 0.5, 3, {"a": ["x", None]}, {"1": True}, "2026-01-02", [1, 2]]
    for key in ("reward_model", "extra_info"):
        columns = {
            "data_source": ["s"] * len(given),
            "reward_model": [{"ground_truth": truth if key == "reward_model" else ""} for truth in given],
            "extra_info": [{"truth": truth} if key == "extra_info" else {} for truth in given],
        }
        jobs = [job for _, _, job in grading_jobs(DataProto.from_dict({}, columns), [""] * len(given))]
        found = [job.ground_truth if key == "reward_model" else job.extra_info["truth"] for job in jobs]
        assert found == plain and list(map(type, found)) == list(map(type, plain))
        assert len({job.digest for job in jobs[: len(TRUTHS)]}) == len(TRUTHS)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_function_gets_the_ground_truth_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {'score': 1.0, "
    )
    path.write_text(path.read_text() + "'seen': repr(ground_truth)}\n")
    pool = ScoringPool(RewardFunctionSpec(str(path)), num_workers=1, timeout_s=10.0)
    results = [future.result() for future in pool.submit([ScoringJob("s", "", truth, {}) for truth in TRUTHS])]
    pool.close()
    assert [result.parse["seen"] for result in results] == [repr(truth) for truth in TRUTHS]


BROKEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth["digit"] == int(extra_info["level"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("override", ["trainer.val_before_train=False", "trainer.val_before_train=True"])
def test_a_run_whose_function_always_fails_stops_in_its_first_step(
    local_ray: None, tmp_path: Path, override: str
) -> None:
    write_inputs(tmp_path)
    rows = pq.read_table(tmp_path / "data.parquet").to_pylist()
    for row in rows:
        row["reward_model"] = {"ground_truth": {"digit": 7}}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    reward = tmp_path / "reward.py"
    reward.write_text(BROKEN)
    where = "validation" if override.endswith("True") else "step"
    with pytest.raises(ValueError, match=f"of a {where} have no grade.*KeyError: 'level'.*reward_model.timeout_s"):
        run_bandit(bandit_config(tmp_path, f"custom_reward_function.path={reward}", override))
    assert list((tmp_path / "reward_ledger").glob("*step_*.jsonl"))
