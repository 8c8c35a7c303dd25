"""--load: assumed in words or as a number, or read from what a run has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.plan.setup import EXPERT_LOAD, expert_load


@pytest.mark.parametrize(("text", "load"), [("balanced", 1.0), ("worst", 32.0), ("2.5", 2.5), ("1", 1.0), ("64", 64.0)])
def test_words_and_numbers(text: str, load: float) -> None:
    assert expert_load(text, 32) == load


def test_of_a_run_the_largest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, EXPERT_LOAD: load}) + "\n" for step, load in ((1, 1.5), (2, 2.25), (3, 1.75)))
    )
    assert expert_load(str(path), 8) == 2.25


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "neither balanced, worst nor a number, and there is no such file"),
        ('{"step": 1, "actor/lr": 1.0}\n', "no step has actor/expert_load_max"),
        ("not JSON\n", "not a run's metrics.jsonl"),
        ('["a list"]\n', "no step has actor/expert_load_max"),
        ("17\n", "not a run's metrics.jsonl"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        expert_load(str(path), 8)


@pytest.mark.parametrize("text", ["0.5", "-1", "nan"])
def test_no_load_is_below_the_mean(text: str) -> None:
    with pytest.raises(ValueError, match="at least the mean"):
        expert_load(text, 8)
