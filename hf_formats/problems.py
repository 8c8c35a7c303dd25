"""Errors that list every problem of a file or directory at once."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN_PROBLEMS = 12
_SHOWN_NAMES = 4


def raise_problems(subject: str, problems: Sequence[str], advice: str = "") -> None:
    """Raise a ValueError with a line for each problem (the first dozen, then a count); do nothing if there is none."""
    if not problems:
        return
    shown = [f"  - {line}" for line in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"  - ... and {len(problems) - _SHOWN_PROBLEMS} more")
    raise ValueError("\n".join([f"{subject} has {len(problems)} problem(s):", *shown, *([advice] if advice else [])]))


def shown_names(names: Sequence[str]) -> str:
    """Return ``3 tensors: a, b, c``, with the first few names only."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{len(names)} tensors: {', '.join(names[:_SHOWN_NAMES])}{more}" if names else "no tensor"
