"""Every graded sample is a line that says who graded it, and that can be graded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tools.regrade import EXIT_BAD_INPUT, EXIT_DIFFERENT, SHOWN, main
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_reward_metrics
from verl.trainer.ppo.reward_ledger import RewardLedger
from verl.utils.reward_score.functions import RewardFunctionSpec, load_reward_function
from verl.workers.config import CustomRewardFunctionConfig, RewardModelConfig
from verl.workers.reward_manager import PooledRewardManager, Scores

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info, right=1.0):
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "raise":
        raise KeyError("no such thing")
    accuracy = float(solution_str == ground_truth)
    return {"score": right * accuracy, "accuracy": accuracy, "pred": solution_str}

def length(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.25, "length": len(solution_str)}
"""
WORDS = ["42", "41", "hang", "raise", "long answer"]


class _Words:
    """A tokenizer of a few words, of which the manager needs only this."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def batch_decode(self, tokens: list[list[int]], **given: bool) -> list[str]:
        return [WORDS[row[0]] for row in tokens]


@pytest.fixture
def reward(tmp_path: Path) -> str:
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    return str(path)


def _scores(reward: str) -> Scores:
    """One sample of each word; the last by another function."""
    config = RewardModelConfig(num_workers=1, timeout_s=2.0)
    by_source = {"long": {"path": reward, "name": "length"}}
    custom = CustomRewardFunctionConfig(path=reward, reward_kwargs={"right": 2.0}, by_data_source=by_source)
    manager = PooledRewardManager(_Words(), config, custom)  # type: ignore[arg-type]
    size = len(WORDS)
    columns: dict[str, list] = {
        "uid": [f"3-{row // 2}" for row in range(size)],
        "prompt_text": [f"prompt {row}" for row in range(size)],
        "data_source": ["math"] * (size - 1) + ["long"],
        "reward_model": [{"ground_truth": "42"}] * size,
        "extra_info": [{"index": row, "array": [1]} for row in range(size)],
    }
    tensors = {"responses": torch.arange(size)[:, None], "response_mask": torch.ones(size, 1, dtype=torch.long)}
    scores = manager.start(DataProto.from_dict(tensors, columns)).result()
    manager.close()
    return scores


def _write(ledger: RewardLedger, step: int, scores: Scores) -> None:
    """In two parts, as a step that samples twice."""
    ledger.add(scores.samples[:2])
    ledger.add(scores.samples[2:])
    ledger.write(step)


@pytest.fixture
def ledger(tmp_path: Path, reward: str) -> Path:
    _write(RewardLedger(str(tmp_path), "texts"), 3, _scores(reward))
    return tmp_path / "reward_ledger" / "step_3.jsonl"


@pytest.mark.timeout(60)
def test_a_line_per_sample_says_what_who_and_how(ledger: Path, reward: str) -> None:
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    version = load_reward_function(RewardFunctionSpec(reward)).version
    first = lines[0]
    assert first.pop("seconds") >= 0
    assert first == {
        "uid": "3-0",
        "step": 3,
        "data_source": "math",
        "prompt": "prompt 0",
        "response": "42",
        "ground_truth": "42",
        "extra_info": {"index": 0, "array": [1]},
        "score": 2.0,
        "parts": {"score": 2.0, "accuracy": 1.0},
        "parse": {"pred": "42"},
        "status": "ok",
        "error": "",
        "grader": {"path": reward, "name": "compute_score", "kwargs": {"right": 2.0}, "version": version},
    }
    assert [line["status"] for line in lines] == ["ok", "ok", "timeout", "error", "ok"]
    assert lines[3]["error"] == "KeyError: 'no such thing'"
    assert lines[4]["grader"]["name"] == "length" and lines[4]["parts"] == {"score": 0.25, "length": 11.0}


@pytest.mark.timeout(60)
def test_time_outs_are_counted_apart_and_parts_over_those_who_have_them(reward: str) -> None:
    metrics = compute_reward_metrics(_scores(reward).parts, "reward")
    assert metrics["reward/timeout"] == metrics["reward/grader_error"] == pytest.approx(1 / 5)
    assert metrics["reward/ungraded"] == pytest.approx(2 / 5)
    assert metrics["reward/accuracy"] == pytest.approx(1 / 4), "of the four that the math function graded"
    assert metrics["reward/score"] == pytest.approx(2.25 / 5)


@pytest.mark.timeout(60)
def test_references_hold_digests_and_off_holds_nothing(tmp_path: Path, reward: str) -> None:
    scores = _scores(reward)
    RewardLedger(str(tmp_path / "a"), "references").write_validation(0, scores.samples)
    path = tmp_path / "a" / "reward_ledger" / "val_step_0.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    assert "response" not in line and len(line["response_sha256"]) == len(line["prompt_sha256"]) == 64
    assert main([str(path)]) == EXIT_BAD_INPUT
    _write(RewardLedger(str(tmp_path / "b"), "off"), 0, scores)
    assert not (tmp_path / "b").exists()


@pytest.mark.timeout(60)
def test_a_validation_has_its_own_samples_alone(tmp_path: Path, reward: str) -> None:
    scores = _scores(reward)
    ledger = RewardLedger(str(tmp_path), "texts")
    ledger.add(scores.samples[:2])  # rejected by a filter while the policy trains, before the validation
    ledger.write_validation(3, scores.samples[2:])
    ledger.write(4)
    lines = {path.stem: len(path.read_text().splitlines()) for path in (tmp_path / "reward_ledger").iterdir()}
    assert lines == {"val_step_3": 3, "step_4": 2}


@pytest.mark.timeout(60)
def test_the_same_graders_grade_the_same(ledger: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(ledger.parent), "--timeout", "2"]) == 0
    assert "0 of 5 differ; mean score 0.4500 -> 0.4500" in capsys.readouterr().out


@pytest.mark.timeout(60)
def test_another_grader_shows_what_it_changes(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        "def grade(data_source, solution_str, ground_truth, extra_info, plus):\n"
        "    return {'score': plus + (solution_str == ground_truth), 'accuracy': solution_str == ground_truth}\n"
    )
    arguments = [str(ledger), "--path", str(other), "--name", "grade", "--kwargs", '{"plus": 1.0}']
    assert main(arguments) == EXIT_DIFFERENT
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "step_3.jsonl:2 uid 3-0 math: score 0 -> 1",
        "step_3.jsonl:3 uid 3-1 math: timeout -> ok, accuracy none -> 0, score 0 -> 1",
        "step_3.jsonl:4 uid 3-1 math: error -> ok, accuracy none -> 0, score 0 -> 1",
        "step_3.jsonl:5 uid 3-2 long: accuracy none -> 0, length 11 -> none, score 0.25 -> 1",
        "long: 1 of 1 differ",
        "math: 3 of 4 differ",
        "4 of 5 differ; mean score 0.4500 -> 1.2000",
    ]

    ledger.write_text("".join(ledger.read_text() for _ in range(8)))  # more than are shown without being asked for
    assert main(arguments) == EXIT_DIFFERENT
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == SHOWN + 4 and shown[SHOWN] == f"... and {32 - SHOWN} more, which --all prints"
    assert main([*arguments, "--all"]) == EXIT_DIFFERENT
    assert len(capsys.readouterr().out.splitlines()) == 32 + 3


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "old.jsonl").write_text('{"uid": "1-0", "data_source": "a", "response": "x", "score": "high"}\n')
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(128, 256)))
    ledger = tmp_path / "list.jsonl"
    for arguments, message in (
        ([tmp_path / "list.jsonl"], "list.jsonl:1 has no data_source, response, "),
        ([tmp_path / "old.jsonl"], "old.jsonl:1 has no ground_truth, status, extra_info, grader, parts, score;"),
        ([tmp_path / "binary.jsonl"], "binary.jsonl is not a UTF-8 text"),
        ([ledger, "--kwargs", "{"], "--kwargs { is not JSON"),
        ([ledger, "--kwargs", "[]"], "--kwargs []: expected an object"),
        ([ledger, "--workers", "0"], "--workers 0 --timeout 10: expected at least 1, and above 0"),
        ([tmp_path / "absent.jsonl"], "is no ledger"),
        ([tmp_path / "empty"], "is no ledger"),
        ([tmp_path / "broken.jsonl"], "broken.jsonl:1 is not JSON"),
    ):
        assert main([str(argument) for argument in arguments]) == EXIT_BAD_INPUT
        assert message in capsys.readouterr().err
