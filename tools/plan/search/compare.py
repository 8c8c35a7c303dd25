"""Why one layout is faster than another: phases whose seconds differ, and the terms that make them differ."""

from __future__ import annotations

from tools.plan.timing import StepTime

WORTH_TELLING = 0.005  # of a step


def differences(other: StepTime, step: StepTime, other_name: str) -> list[str]:
    """A sentence for each phase of ``step`` that takes longer or shorter than ``other``'s, largest first."""
    found = []
    for phase, seconds in step.seconds.items():
        change = seconds - other.seconds.get(phase, 0.0)
        if abs(change) >= WORTH_TELLING * other.total_s:
            found.append((abs(change), _sentence(phase, other, step, other_name)))
    return [text for _, text in sorted(found, key=lambda pair: -pair[0])]


def _sentence(phase: str, other: StepTime, step: StepTime, other_name: str) -> str:
    before, after = other.terms.get(phase, {}), step.terms[phase]
    total = sum(after.values()) - sum(before.values())
    changes = sorted(
        ((after.get(name, 0.0) - before.get(name, 0.0), name) for name in dict.fromkeys([*before, *after])),
        key=lambda pair: -abs(pair[0]),
    )
    told = [
        f"{name} {before.get(name, 0.0):,.1f} to {after.get(name, 0.0):,.1f}"
        for change, name in changes[:3]
        if abs(change) >= 0.1 * abs(total)
    ]
    word = "shorter" if total < 0 else "longer"
    return f"{phase} is {abs(total):,.1f} s {word} than {other_name}'s ({'; '.join(told)})"
