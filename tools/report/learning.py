"""Whether a run has learned, and the signs that it did not, from its metrics."""

from __future__ import annotations

from hf_formats.ranges import runs_text
from tools.report.run_data import RunData, is_finite
from verl.trainer.ppo.signs import SIGNS, Signs


def verdict(run: RunData) -> str:
    """The sentence that the run ends with, also of a run that goes on."""
    signs = Signs(counts={name: len(steps) for name, steps in _steps_of(run).items()})
    for row in run.metrics:
        signs.add_metrics(int(row["step"]), {name: value for name, value in row.items() if is_finite(value)})
    return signs.verdict()


def signs_of(run: RunData) -> list[tuple[str, str, str]]:
    """Name, steps and advice of every sign in the run, the most important first."""
    return [(name, runs_text(steps), SIGNS[name].advice) for name, steps in _steps_of(run).items()]


def _steps_of(run: RunData) -> dict[str, list[int]]:
    found = {name: [step for step, value in run.series(f"signs/{name}") if value] for name in SIGNS}
    return {name: steps for name, steps in found.items() if steps}
