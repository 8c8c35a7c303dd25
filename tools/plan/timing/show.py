"""Predicted steps as tables: what a phase takes, how far off that may be, and what it goes to."""

from __future__ import annotations

from collections.abc import Sequence

from tools.plan.timing.constants import PhaseError
from tools.plan.timing.cost import StepTime
from tools.plan.timing.sensitivity import Variation


def step_table(step: StepTime) -> list[str]:
    """Markdown lines: a phase a line with its error among published rows and its largest terms, the step last."""
    lines = ["| phase | seconds | off by, of published rows | mostly |", "|---|---|---|---|"]
    for phase, seconds in step.seconds.items():
        if seconds > 0:
            mostly = ", ".join(f"{name} {spent:.1f}" for name, spent in step.dominant(phase) if spent > 0.05 * seconds)
            lines.append(f"| {phase} | {seconds:.1f} | {off_by(step.errors.get(phase))} | {mostly} |")
    rate = f"{step.tokens_per_s_device:.1f} tokens a second and device"
    return [*lines, f"| step | {step.total_s:.1f} | {off_by(step.errors.get('total'))} | {rate} |"]


def sensitivity_table(variations: Sequence[Variation]) -> list[str]:
    """Markdown lines: a variation a line, beside the first."""
    first = variations[0].step
    lines = ["| with | seconds | change | tokens a second and device |", "|---|---|---|---|"]
    for variation in variations:
        step = variation.step
        change = f"{step.total_s / first.total_s - 1:+.0%}" if step is not first else ""
        lines.append(f"| {variation.what} | {step.total_s:.1f} | {change} | {step.tokens_per_s_device:.1f} |")
    return lines


def off_by(error: PhaseError | None) -> str:
    """The largest leave-one-out error, and of how many published rows."""
    if error is None:
        return "no published row"
    return f"up to {error.error:.0%} ({error.rows} row{'s' if error.rows > 1 else ''})"
