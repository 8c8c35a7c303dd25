"""The comparison of algorithms: what it makes of runs, and, with ``-m slow``, the runs themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.algorithms import ALGORITHMS, BASELINE, main

STEPS = 20


def _write_run(output: Path, name: str, after: float) -> None:
    records = [{"step": 0, "val/score": 0.4}, {"step": 10}, {"step": STEPS, "val/score": after}]
    (output / name).mkdir(parents=True)
    (output / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_runs_that_are_there_are_compared_with_grpo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, after in ((BASELINE, 0.7), ("rloo", 0.72), ("gspo", 0.5)):
        _write_run(tmp_path, name, after)
    assert main(["--output", str(tmp_path), "rloo"]) == 0
    assert "| rloo | 0.400 | 0.720 | +0.020 |" in capsys.readouterr().out
    assert main(["--output", str(tmp_path), "rloo", "gspo"]) == 1
    assert "| gspo | 0.400 | 0.500 | -0.200 |" in capsys.readouterr().out
    assert main(["--output", str(tmp_path), "nothing"]) == 2
    assert "unknown: nothing; there are grpo, " in capsys.readouterr().err


@pytest.mark.slow  # about two minutes for each algorithm and seed
@pytest.mark.timeout(3 * 3600)
def test_every_algorithm_reaches_the_score_of_grpo_on_arithmetic(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path), "--steps", str(STEPS), "--seeds", "2", *ALGORITHMS]) == 0
