"""Fitting the constants to the published rows, and predicting each row from the others.

The fit minimises over the logarithms of the fitted constants

    sum over rows' phases of log(predicted / published)^2 / 0.1^2  +  sum over constants of log(value / prior)^2 / spread^2

so that a constant of which the rows say nothing keeps its prior. Gauss-Newton with numerical derivatives; pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from tools.plan.timing.constants import Constants
from tools.plan.timing.cost import StepTime, predict
from tools.plan.timing.published import PublishedRun

NOISE = 0.1  # what a published phase may differ from run to run and by what is not modelled, as a share
MAIN_SHARE = 0.05  # phases below this share of a step are shown and not fitted
STEPS = 8


@dataclass(frozen=True)
class Miss:
    """One published number beside the predicted. ``phase``: as published, or ``total``."""

    run: str
    phase: str
    published_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Share by which the prediction is too long."""
        return self.predicted_s / self.published_s - 1.0


def compare(run: PublishedRun, constants: Constants) -> list[Miss]:
    """Every published number of ``run`` beside its prediction, the total last."""
    step = predict(run.shape, run.device, constants)
    found = [Miss(run.name, phase, seconds, _of_phases(step, phase)) for phase, seconds in run.seconds.items()]
    return [*found, Miss(run.name, "total", run.total_s, step.total_s)]


def is_main(miss: Miss, run: PublishedRun) -> bool:
    """Whether the number is fitted, and held against the bars: not a small phase, nor one that is the grader's."""
    return miss.phase != "reward" and miss.published_s >= MAIN_SHARE * run.total_s


def fit(runs: Sequence[PublishedRun], constants: Constants) -> Constants:
    """``constants`` with its fitted ones at their best values for ``runs``."""
    free = constants.fitted
    families = {run.device.family for run in runs} | {"all"}
    active = [constant for constant in free if constant.family in families]
    at = [log(constant.prior) for constant in active]
    base = constants.with_values({constant.key: constant.prior for constant in free})

    def residuals(point: Sequence[float]) -> list[float]:
        there = base.with_values({c.key: exp(x) for c, x in zip(active, point, strict=True)})
        found = [
            log(miss.predicted_s / miss.published_s) / NOISE
            for run in runs
            for miss in compare(run, there)
            if is_main(miss, run)
        ]
        return found + [(x - log(c.prior)) / c.spread for c, x in zip(active, point, strict=True)]

    now = residuals(at)
    for _ in range(STEPS):
        columns = []
        for place in range(len(at)):
            moved = list(at)
            moved[place] += 0.02
            columns.append([(after - before) / 0.02 for after, before in zip(residuals(moved), now, strict=True)])
        step = _least_squares(columns, now)
        for scale in (1.0, 0.5, 0.25, 0.125):
            moved = [x - scale * dx for x, dx in zip(at, step, strict=True)]
            then = residuals(moved)
            if _square(then) < _square(now):
                break
        else:
            break
        gained = _square(now) - _square(then)
        at, now = moved, then
        if gained < 1e-6:
            break
    return base.with_values({c.key: exp(x) for c, x in zip(active, at, strict=True)})


def leave_one_out(runs: Sequence[PublishedRun], constants: Constants) -> list[tuple[PublishedRun, Constants, list[Miss]]]:
    """Every run, the constants fitted without it, and its numbers predicted with those."""
    found = []
    for run in runs:
        without = fit([other for other in runs if other is not run], constants)
        found.append((run, without, compare(run, without)))
    return found


def _of_phases(step: StepTime, phases: str) -> float:
    seconds = step.seconds
    return sum(seconds[phase] for phase in phases.split("+"))


def _square(values: Sequence[float]) -> float:
    return sum(value * value for value in values)


def _least_squares(columns: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """x that minimises |A x - target|, A by columns: the normal equations, by Gauss-Jordan elimination."""
    size = len(columns)
    rows = [
        [sum(a * b for a, b in zip(columns[i], columns[j], strict=True)) for j in range(size)]
        + [sum(a * b for a, b in zip(columns[i], target, strict=True))]
        for i in range(size)
    ]
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda row: abs(rows[row][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        rows[pivot] = [value / rows[pivot][pivot] for value in rows[pivot]]
        for other in range(size):
            if other != pivot:
                factor = rows[other][pivot]
                rows[other] = [value - factor * lead for value, lead in zip(rows[other], rows[pivot], strict=True)]
    return [row[-1] for row in rows]
