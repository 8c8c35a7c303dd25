"""Files of single steps in a run's directory, named ``step_N`` with any prefix and suffix."""

from __future__ import annotations

import re
from pathlib import Path

_STEP = re.compile(r"(?:.*_)?step_(\d+)\.\w+")


def steps_of(directory: Path, pattern: str) -> list[int]:
    """The steps of the files that match ``pattern``, in order."""
    return sorted(int(match[1]) for path in directory.glob(pattern) if (match := _STEP.fullmatch(path.name)))


def remove_steps(directory: Path, pattern: str, first_step: int) -> None:
    """Removes the files of ``first_step`` and later that match ``pattern``: a resumed run repeats those steps."""
    for path in directory.glob(pattern):
        match = _STEP.fullmatch(path.name)
        if match and int(match[1]) >= first_step:
            path.unlink()
