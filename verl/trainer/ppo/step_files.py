"""Files of single steps in a run's directory: ``step_N`` with any prefix and ending."""

from __future__ import annotations

import re
from pathlib import Path

_STEP = re.compile(r"(?:.*_)?step_(\d+)\.\w+")


def steps_of(directory: Path, pattern: str) -> list[int]:
    """The steps of the files that ``pattern`` finds, in order."""
    return sorted(int(match[1]) for path in directory.glob(pattern) if (match := _STEP.fullmatch(path.name)))


def remove_steps(directory: Path, pattern: str, first_step: int) -> None:
    """Removes what ``pattern`` finds of ``first_step`` and later: a resumed run takes those steps again."""
    for path in directory.glob(pattern):
        match = _STEP.fullmatch(path.name)
        if match and int(match[1]) >= first_step:
            path.unlink()
