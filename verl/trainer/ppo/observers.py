"""Hooks for observers of the training steps, so that writing about a step is no part of the algorithm.

Their files of single steps are named ``step_N`` with any prefix and suffix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hf_formats.files import write_text
from verl.protocol import DataProto

_STEP = re.compile(r"(?:.*_)?step_(\d+)\.\w+")


@dataclass(frozen=True)
class Step:
    """The current step.

    Attributes:
        number: the global step.
        batch: its samples so far; observers must not change it.
        sampling: the source's metrics of how the samples came about.
        timing: seconds per phase, which ``marked_timer`` fills.
    """

    number: int
    batch: DataProto
    sampling: dict[str, float]
    timing: dict[str, float]


class StepObserver:
    """Base of the observers; a hook does nothing unless it is overridden."""

    def cut_back(self, first_step: int) -> None:
        """Removes what was written about ``first_step`` and later steps, which will be run again."""

    def before_step(self, number: int) -> None:
        """Called before anything of the step is done."""

    def after_rewards(self, step: Step) -> None:
        """Called when the batch has its scores, and its log-probs where the step needs some."""

    def before_update(self, step: Step) -> None:
        """Called when the batch has its advantages; the weights have not been updated yet."""

    def before_log(self, number: int, metrics: dict[str, float]) -> dict[str, float]:
        """Called with the metrics of a step, or of the validation before the first (0); returns further ones."""
        return {}

    def after_step(self, number: int) -> None:
        """Called when the step has been logged, validated and saved."""

    def after_run(self) -> None:
        """Called when the last step of training is over; not when the run was stopped."""


def steps_of(directory: Path, pattern: str) -> list[int]:
    return sorted(int(match[1]) for path in directory.glob(pattern) if (match := _STEP.fullmatch(path.name)))


class StepFiles(StepObserver):
    """An observer that writes files of single steps.

    Args:
        pattern: the names of its files in ``directory``.
    """

    def __init__(self, directory: Path, pattern: str) -> None:
        self.directory, self._pattern = directory, pattern

    def cut_back(self, first_step: int) -> None:
        for path in self.directory.glob(self._pattern):
            match = _STEP.fullmatch(path.name)
            if match and int(match[1]) >= first_step:
                path.unlink(missing_ok=True)

    def write_file(self, name: str, text: str) -> None:
        """Writes a file atomically; it is on disk when this returns."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(self.directory / name, text)
