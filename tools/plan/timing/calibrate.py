"""Fit the cost model to the published steps and show how well it predicts a step that it has not seen.

python -m tools.plan.timing.calibrate            the table of docs/time_model.md, and one of the constants
python -m tools.plan.timing.calibrate --write    and put the fitted values and the errors into constants.toml

The fit minimises over the logarithms of the fitted constants

    sum over phases of (log(predicted / published) / noise)^2 + sum over constants of (log(value / prior) / spread)^2

so that a constant that no row depends on keeps its prior. The noise of a small phase and of the reward is wide: it
decides only constants that nothing else decides. Far-off rows count linearly, not as squares (pseudo-Huber).
Gauss-Newton with numerical derivatives.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import copysign, exp, log, sqrt
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hf_formats.files import write_text
from tools.plan.timing.constants import ALL, TABLE, Constants, PhaseError, load_constants
from tools.plan.timing.cost import predict
from tools.plan.timing.published import PublishedRun, published_runs

PHASE_BAR, TOTAL_BAR = 0.25, 0.15  # what a prediction should be within
NOISE = 0.1  # what a published phase may differ from run to run and by what is not modelled, as a share
SMALL_NOISE = 0.5
MAIN_SHARE = 0.05  # of a step: phases below are small
STEPS = 12
Residuals: TypeAlias = dict[tuple[str, ...], list[float]]  # of a row, by its name and the values it depends on


@dataclass(frozen=True)
class Miss:
    """A published number and its prediction. ``phase``: as published, or ``total``."""

    phase: str
    published_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Share by which the prediction is too long."""
        return self.predicted_s / self.published_s - 1.0


@dataclass(frozen=True)
class LeftOut:
    """A run, the constants fitted without it, and its published numbers with their predictions."""

    run: PublishedRun
    constants: Constants
    misses: list[Miss]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    about = "Fit the cost model to the published steps; print how well it predicts each from the others."
    parser = argparse.ArgumentParser(prog="python -m tools.plan.timing.calibrate", description=about)
    parser.add_argument("--write", action="store_true", help="put the fitted values and errors into constants.toml")
    write = parser.parse_args(arguments).write
    constants, alone = calibrated()
    if write:
        write_constants(constants, TABLE)
    print(error_table(constants, alone), constants_table(constants, alone), sep="\n\n")


def calibrated() -> tuple[Constants, list[LeftOut]]:
    """The constants fitted on every row, with the leave-one-out errors, and the fits that these come from."""
    runs = published_runs()
    best = fit(runs, load_constants(), {})
    alone = leave_out(runs, best)
    return Constants(best.by_key, worst_errors(alone)), alone


def worst_errors(alone: Iterable[LeftOut]) -> dict[str, dict[str, PhaseError]]:
    """Largest leave-one-out error of each phase, by device family.

    A number that a source gives for several phases together counts for the last of them, the longest.
    """
    errors: dict[str, dict[str, list[float]]] = {}
    for left in alone:
        for miss in left.misses:
            phases = errors.setdefault(left.run.device.family, {})
            phases.setdefault(miss.phase.split("+")[-1], []).append(round(abs(miss.error), 2))
    return {
        family: {phase: PhaseError(max(found), len(found)) for phase, found in phases.items()}
        for family, phases in errors.items()
    }


def error_table(constants: Constants, alone: Sequence[LeftOut]) -> str:
    """Every published number beside its prediction, in Markdown."""
    grouped = leave_out([left.run for left in alone], constants, whole_group=True)
    lines = [
        "| run | phase | published s | predicted s | error | without its group | |",
        "|---|---|---|---|---|---|---|",
    ]
    for left, without in zip(alone, grouped, strict=True):
        name = left.run.name
        for miss, other in zip(left.misses, without.misses, strict=True):
            phase, errors = miss.phase.replace("+", " + "), f"{miss.error:+.0%} | {other.error:+.0%}"
            seconds = (f"{x:.0f}" if x >= 100 else f"{x:.1f}" for x in (miss.published_s, miss.predicted_s))
            lines.append(f"| {name} | {phase} | {' | '.join(seconds)} | {errors} |{_verdict(miss, left)} |")
            name = ""
    return "\n".join(lines)


def constants_table(constants: Constants, alone: Sequence[LeftOut]) -> str:
    """The fitted constants, and how far they move when a row is left out, in Markdown."""
    lines = ["| fitted constant | value | prior | range without a row | fitted on |", "|---|---|---|---|---|"]
    for constant in constants.fitted:
        values = [left.constants.by_key[constant.key].value for left in alone]
        lines.append(
            f"| `{constant.key}` | {constant.value:.3g} | {constant.prior:.3g} | "
            f"{min(values):.3g} to {max(values):.3g} | {constant.origin} |"
        )
    return "\n".join(lines)


def write_constants(constants: Constants, path: Path) -> None:
    """Replaces the fitted values and the errors in ``path``, and nothing else."""
    text = path.read_text(encoding="utf-8").split("\n[errors.", 1)[0].rstrip("\n")
    for constant in constants.fitted:
        row = re.escape(f"{constant.key} = {{ value = ")
        text = re.sub(rf"(?m)^({row})[^,]*", rf"\g<1>{constant.value:.4g}", text)
    for family, errors in constants.errors.items():
        text += f"\n\n[errors.{family}]  # largest leave-one-out error of a phase; written by calibrate --write\n"
        text += "\n".join(
            f"{phase} = {{ error = {worst.error:.2f}, rows = {worst.rows} }}" for phase, worst in errors.items()
        )
    write_text(path, text + "\n")


def _verdict(miss: Miss, left: LeftOut) -> str:
    if not is_main(miss, left.run):
        return " small"
    bar = TOTAL_BAR if miss.phase == "total" else PHASE_BAR
    return "" if abs(miss.error) <= bar else f" **misses {bar:.0%}**"


def compare(run: PublishedRun, constants: Constants) -> list[Miss]:
    """Every published number of ``run`` with its prediction, the total last."""
    step = predict(run.shape, run.device, constants)
    found = [
        Miss(phases, seconds, sum(step.seconds[phase] for phase in phases.split("+")))
        for phases, seconds in run.seconds.items()
    ]
    return [*found, Miss("total", run.total_s, step.total_s)]


def is_main(miss: Miss, run: PublishedRun) -> bool:
    """Whether the number is held against the bars: neither a small phase nor the grader's own."""
    return miss.phase != "reward" and miss.published_s >= MAIN_SHARE * run.total_s


def fit(runs: Sequence[PublishedRun], constants: Constants, known: Residuals, tolerance: float = 1e-7) -> Constants:
    """``constants`` with its fitted ones at their best values for ``runs``, beginning with the values they have.

    Ends when an iteration gains less than ``tolerance`` of the sum above. ``known`` is read and added to.
    """
    families = {run.device.family for run in runs} | {ALL}
    free = [constant for constant in constants.fitted if constant.family in families]
    base = constants.with_values({constant.key: constant.prior for constant in constants.fitted})
    at = np.log([constant.value for constant in free])

    def row_residuals(run: PublishedRun, values: dict[str, float]) -> list[float]:
        mine = (run.device.family, ALL)
        key = (run.name, *(repr(values[c.key]) for c in free if c.family in mine))
        if key not in known:
            known[key] = [
                _softened(log(miss.predicted_s / miss.published_s) / (NOISE if is_main(miss, run) else SMALL_NOISE))
                for miss in compare(run, base.with_values(values))
            ]
        return known[key]

    def residuals(point: np.ndarray) -> np.ndarray:
        values = {c.key: exp(x) for c, x in zip(free, point.tolist(), strict=True)}
        found = [residual for run in runs for residual in row_residuals(run, values)]
        return np.array(found + [(x - log(c.prior)) / c.spread for c, x in zip(free, point.tolist(), strict=True)])

    now = residuals(at)
    for _ in range(STEPS):
        columns = [(residuals(at + move) - now) / 0.02 for move in 0.02 * np.eye(len(at))]
        step = np.linalg.lstsq(np.stack(columns, axis=1), now, rcond=None)[0]
        for scale in (1.0, 0.5, 0.25, 0.125):
            moved = at - scale * step
            then = residuals(moved)
            if then @ then < now @ now:
                break
        else:
            break
        gained = now @ now - then @ then
        at, now = moved, then
        if gained < tolerance:
            break
    return base.with_values({c.key: exp(x) for c, x in zip(free, at.tolist(), strict=True)})


def leave_out(runs: Sequence[PublishedRun], constants: Constants, *, whole_group: bool = False) -> list[LeftOut]:
    """Every run predicted with constants fitted without it, or without its whole group."""
    fits: dict[tuple[str, ...], Constants] = {}
    known: Residuals = {}  # every fit begins at the same point
    found = []
    for run in runs:
        kept = [other for other in runs if (other.group != run.group if whole_group else other is not run)]
        names = tuple(other.name for other in kept)
        if names not in fits:
            fits[names] = fit(kept, constants, known, tolerance=1e-5)
        found.append(LeftOut(run, fits[names], compare(run, fits[names])))
    return found


def _softened(residual: float) -> float:
    """A value whose square is residual^2 near 0 and 2 |residual| far from it."""
    return copysign(sqrt(2 * (sqrt(1 + residual * residual) - 1)), residual)


if __name__ == "__main__":
    main()
