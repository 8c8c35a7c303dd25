"""The comparison of algorithms: what it makes of runs, and, with ``-m slow``, the runs themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.workshop.bench.algorithms import BASELINE, main

STEPS = 20


def _write_run(output: Path, name: str, scores: dict[int, float]) -> None:
    records = [{"step": 0, "val/score": 0.4}, {"step": 10}]
    records += [{"step": step, "val/score": score} for step, score in scores.items()]
    (output / name).mkdir(parents=True)
    (output / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_runs_that_are_there_are_compared_with_grpo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = {STEPS: 0.65, 36: 0.7, 40: 0.69}
    lasting = {STEPS: 0.5, 40: 0.6, 60: 0.65}
    runs = {BASELINE: {STEPS: 0.7}, "rloo": {16: 0.71, STEPS: 0.68}, "gspo": later, "cispo": lasting}
    for name, scores in runs.items():
        _write_run(tmp_path, name, scores)
    assert main(["--output", str(tmp_path), "rloo", "gspo"]) == 0
    lines = capsys.readouterr().out
    assert "grpo after 20 steps, mean of 1 seeds: 0.700" in lines
    assert "| rloo | 0.400 | 0.680 | -0.020 | 16 steps | 0.710 |" in lines
    assert "| gspo | 0.400 | 0.650 | -0.050 | 36 steps | 0.700 |" in lines
    assert main(["--output", str(tmp_path), "rloo", "cispo"]) == 1
    assert "| cispo | 0.400 | 0.500 | -0.200 | not in 60 | 0.650 |" in capsys.readouterr().out


def test_the_mean_of_the_seeds_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, after in ((BASELINE, 0.7), (f"{BASELINE}-seed1", 0.8), ("tis", 0.9), ("tis-seed1", 0.6)):
        _write_run(tmp_path, name, {STEPS: after})
    assert main(["--output", str(tmp_path), "--seeds", "2", "tis"]) == 0
    assert "| tis | 0.400 | 0.750 | +0.000 | 20 steps | 0.750 |" in capsys.readouterr().out


def test_what_cannot_be_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path), "nothing"]) == 2
    assert "unknown: nothing; there are grpo, " in capsys.readouterr().err
    assert main(["--output", str(tmp_path), "--every", "3"]) == 2
    assert "--steps must be a multiple of --every" in capsys.readouterr().err


@pytest.mark.slow  # about two minutes for each; the command itself takes all of them, in an hour and a half
@pytest.mark.timeout(3600)
def test_algorithms_of_each_kind_reach_the_score_of_grpo_on_arithmetic(tmp_path: Path) -> None:
    filtered, other_estimator, corrected = "dapo", "rloo", "tis"
    assert main(["--output", str(tmp_path), "--steps", str(STEPS), filtered, other_estimator, corrected]) == 0
