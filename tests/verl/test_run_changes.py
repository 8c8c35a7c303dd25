"""A resumed run that learns from something else says what, from which step on, and only that."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from verl.trainer.config import load_config
from verl.trainer.config.override_text import override
from verl.trainer.ppo.run_changes import RECORD, learning_settings, record_changes


def test_another_reward_data_set_or_algorithm_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward, data = tmp_path / "reward.py", tmp_path / "train.parquet"
    reward.write_text("def compute_score(*_): return 0\n")
    data.write_bytes(b"rows")
    overrides = [override("custom_reward_function.path", reward), override("data.train_files", data)]
    was = learning_settings(load_config(overrides))
    assert learning_settings(load_config([*overrides, "trainer.total_epochs=9"])) == was == json.loads(json.dumps(was))
    record_changes(str(tmp_path), 4, was, was)
    record_changes(str(tmp_path), 4, {}, was)  # a checkpoint of an earlier version says nothing
    assert not (tmp_path / RECORD).exists()

    reward.write_text("def compute_score(*_): return 1\n")
    data.write_bytes(b"other rows")
    now = learning_settings(load_config([*overrides, "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=3"]))
    with caplog.at_level(logging.WARNING):
        record_changes(str(tmp_path), 4, was, now)
    (line,) = [json.loads(text) for text in (tmp_path / RECORD).read_text().splitlines()]
    assert line["step"] == 5 and [change["key"] for change in line["changes"]] == [
        "actor_rollout_ref.rollout.n",
        "algorithm.adv_estimator",
        "custom_reward_function",
        "data.train_files",
    ]
    assert line["changes"][1] == {"key": "algorithm.adv_estimator", "was": "grpo", "now": "rloo"}
    assert "from step 5 on this run learns from something else" in caplog.text

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        record_changes(str(tmp_path / "other"), 4, {**was, "OMP_NUM_THREADS": 2}, {**was, "OMP_NUM_THREADS": 1})
    told = "the last bits differ from those of one run: OMP_NUM_THREADS was 2, is 1; set OMP_NUM_THREADS=2 to keep them"
    assert told in caplog.text and "something else" not in caplog.text
    assert (tmp_path / "other" / RECORD).exists()

    record_changes(str(tmp_path), 6, now, now)  # goes on after step 6
    assert len((tmp_path / RECORD).read_text().splitlines()) == 1
    record_changes(str(tmp_path), 2, was, was)  # or again from step 2, with what it had at first
    assert (tmp_path / RECORD).read_text() == ""
