"""Whether a run has learned, and the signs that it did not, from its metrics."""

from __future__ import annotations

from collections.abc import Sequence

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
    return [(name, ranges(steps), SIGNS[name].advice) for name, steps in _steps_of(run).items()]


def ranges(steps: Sequence[int]) -> str:
    """Sorted numbers as a person writes them: 1-3, 7."""
    starts, ends = ([step for step in steps if step + beside not in steps] for beside in (-1, 1))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _steps_of(run: RunData) -> dict[str, list[int]]:
    found = {name: [step for step, value in run.series(f"signs/{name}") if value] for name in SIGNS}
    return {name: steps for name, steps in found.items() if steps}
