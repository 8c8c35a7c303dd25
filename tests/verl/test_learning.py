"""The signs of not learning in runs of the trainer: one line, metrics, the last line; resumed as never stopped."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.pages import undocumented
from tests.verl.bandit import bandit_config, run_bandit, write_inputs
from tools.report.learning import signs_of, verdict
from tools.report.run_data import read_run
from verl.trainer.config.override_text import override

ALWAYS_0 = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.0, "format": 0.0}
"""
LONG = "trainer.total_training_steps=9"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return _inputs(tmp_path)


def _inputs(root: Path) -> Path:
    write_inputs(root)
    (root / "always_0.py").write_text(ALWAYS_0)
    return root


def _always_0(root: Path) -> str:
    return override("custom_reward_function.path", root / "always_0.py")


def _signs(root: Path) -> list[list[str]]:
    """Names by step."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert undocumented(name for row in rows for name in row) == []
    return [[name.removeprefix("signs/") for name in row if name.startswith("signs/")] for row in rows]


def _printed(caplog: pytest.LogCaptureFixture, text: str = "sign of not learning") -> Sequence[str]:
    return [line for line in caplog.messages if text in line]


@pytest.mark.timeout(240)
def test_a_reward_that_is_always_0_is_named_once_counted_reported_and_the_same_in_a_resumed_run(
    local_ray: None, root: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    whole = _inputs(tmp_path_factory.mktemp("whole"))
    with caplog.at_level(logging.INFO):
        run_bandit(bandit_config(whole, _always_0(whole), LONG))
    # 32 samples a step: from the third on they are too many for chance
    assert _signs(whole) == [[]] * 3 + [["no_format", "equal_rewards", "no_gradient"]] * 7
    lines = _printed(caplog, "has a sign")
    assert [line.split()[1] for line in lines] == ["3", "4", "6"]
    line = lines[0]
    assert line.startswith("step 3 has a sign of not learning, no_format: ") and line.isprintable()
    assert line.count("(0)") == 3 and "check the chat template" in line
    (last,) = _printed(caplog, "signs of not learning")
    assert last.startswith("no more than noise: validation score 0.000 [0.000, 0.194] (step 0) -> 0.000 [0.000, 0.194]")
    assert last.endswith("signs of not learning: no_format (7 steps), equal_rewards (7 steps), no_gradient (7 steps)")
    run = read_run(whole)
    assert verdict(run) == last
    assert signs_of(run)[0][:2] == ("no_format", "3-9")

    caplog.clear()
    for total in (2, 4, 9):
        run_bandit(bandit_config(root, _always_0(root), f"trainer.total_training_steps={total}"))
    assert _signs(root) == _signs(whole)
    assert _printed(caplog, "has a sign") == lines


@pytest.mark.timeout(240)
def test_a_run_that_learns_names_nothing_and_says_that_it_has_learned(
    local_ray: None, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run_bandit(
            bandit_config(root, LONG, "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
        )
    assert not any(_signs(root)) and _printed(caplog, "has a sign") == []
    (last,) = _printed(caplog, "signs of not learning")
    assert last.startswith("it has learned: validation score 0.") and last.endswith("signs of not learning: none")


@pytest.mark.timeout(240)
def test_a_step_that_finds_no_group_to_train_on_says_so_before_it_gives_up(
    local_ray: None, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filters = "algorithm.filter_groups={enable:True,metric:score,max_num_gen_batches:20}"
    with pytest.raises(ValueError, match="20 generations gave 0 of the 4 prompts"):
        run_bandit(bandit_config(root, _always_0(root), filters, "data.gen_batch_size=3"))
    (line,) = _printed(caplog)
    assert line.startswith("step 1 has a sign of not learning, no_gradient: ") and line.count("(0)") == 3
