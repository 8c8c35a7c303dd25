"""Fit the cost model to the published steps and show how well it predicts a step that it has not seen.

python -m tools.plan.timing.calibrate            the tables of docs/time_model.md
python -m tools.plan.timing.calibrate --write    and put the fitted values and the errors into constants.toml
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from recipes.common.atomic_files import write_text_atomically
from tools.plan.timing.constants import TABLE, Constants, PhaseError, load_constants
from tools.plan.timing.fit import LeftOut, Miss, fit, is_main, leave_out
from tools.plan.timing.published import published_runs

PHASE_BAR, TOTAL_BAR = 0.25, 0.15  # what a prediction should be within


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    about = "Fit the cost model to the published steps; print how well it predicts each from the others."
    parser = argparse.ArgumentParser(prog="python -m tools.plan.timing.calibrate", description=about)
    parser.add_argument("--write", action="store_true", help="put the fitted values and errors into constants.toml")
    write = parser.parse_args(arguments).write
    constants, alone = calibrated()
    if write:
        write_constants(constants, TABLE)
    print(tables(constants, alone))


def calibrated() -> tuple[Constants, list[LeftOut]]:
    """The constants fitted on every row, with the leave-one-out errors beside them, and what these come from."""
    runs = published_runs()
    best = fit(runs, load_constants())
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


def tables(constants: Constants, alone: Sequence[LeftOut]) -> str:
    """What the command prints, in Markdown."""
    grouped = leave_out([left.run for left in alone], constants, whole_group=True)
    lines = [
        "| run | phase | published s | predicted s | error | without its group | bar |",
        "|---|---|---|---|---|---|---|",
    ]
    for left, without in zip(alone, grouped, strict=True):
        name = left.run.name
        for miss, other in zip(left.misses, without.misses, strict=True):
            phase, errors = miss.phase.replace("+", " + "), f"{miss.error:+.0%} | {other.error:+.0%}"
            seconds = (f"{x:.0f}" if x >= 100 else f"{x:.1f}" for x in (miss.published_s, miss.predicted_s))
            lines.append(f"| {name} | {phase} | {' | '.join(seconds)} | {errors} | {_verdict(miss, left)} |")
            name = ""
    lines += ["", "| fitted constant | value | prior | range without a row | fitted on |", "|---|---|---|---|---|"]
    for constant in constants.fitted:
        values = [left.constants.by_key[constant.key].value for left in alone]
        lines.append(
            f"| `{constant.key}` | {constant.value:.3g} | {constant.prior:.3g} | "
            f"{min(values):.3g} to {max(values):.3g} | {constant.origin} |"
        )
    return "\n".join(lines)


def write_constants(constants: Constants, path: Path) -> None:
    """The fitted values and the errors in place of those in ``path``; all else stays as it is."""
    text = path.read_text(encoding="utf-8").split("\n[errors.", 1)[0].rstrip("\n")
    for constant in constants.fitted:
        section = re.escape(f"[{constant.key}]")
        text = re.sub(rf"({section}\nvalue = ).*", rf"\g<1>{constant.value:.4g}", text)
    for family, errors in constants.errors.items():
        text += f"\n\n[errors.{family}]  # largest leave-one-out error of a phase; written by calibrate --write\n"
        text += "\n".join(
            f"{phase} = {{ error = {worst.error:.2f}, rows = {worst.rows} }}" for phase, worst in errors.items()
        )
    write_text_atomically(path, text + "\n")


def _verdict(miss: Miss, left: LeftOut) -> str:
    if not is_main(miss, left.run):
        return "small"
    bar = TOTAL_BAR if miss.phase == "total" else PHASE_BAR
    return f"within {bar:.0%}" if abs(miss.error) <= bar else f"**misses {bar:.0%}**"


if __name__ == "__main__":
    main()
