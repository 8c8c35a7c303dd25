"""Predicted steps as rows of a table: what a phase takes, how far off that may be, and what it goes to."""

from __future__ import annotations

from collections.abc import Sequence

from tools.plan.timing.constants import PhaseError
from tools.plan.timing.cost import StepTime
from tools.plan.timing.sensitivity import Variation


def phase_rows(step: StepTime) -> list[tuple[str, str, str, str]]:
    """Phase, seconds, its error among published rows, its largest terms; the whole step and its rate last."""
    rows = []
    for phase, seconds in step.seconds.items():
        if seconds > 0:
            mostly = ", ".join(f"{name} {spent:,.1f}" for name, spent in step.dominant(phase) if spent > 0.05 * seconds)
            rows.append((phase, f"{seconds:,.1f}", _off_by(step.errors.get(phase)), mostly))
    rate = f"{step.tokens_per_s_device:,.1f} tokens/s/device"
    return [*rows, ("step", f"{step.total_s:,.1f}", _off_by(step.errors.get("total")), rate)]


def variation_rows(variations: Sequence[Variation]) -> list[tuple[str, str, str, str]]:
    """What differs, seconds, change beside the first, tokens per second and device."""
    first = variations[0].step
    return [
        (
            variation.what,
            f"{variation.step.total_s:,.1f}",
            f"{variation.step.total_s / first.total_s - 1:+.0%}" if variation.step is not first else "",
            f"{variation.step.tokens_per_s_device:,.1f}",
        )
        for variation in variations
    ]


def _off_by(error: PhaseError | None) -> str:
    """The largest leave-one-out error, and of how many published rows."""
    if error is None:
        return "no published row"
    return f"up to {error.error:.0%} ({error.rows} row{'s' if error.rows > 1 else ''})"
