"""Hooks for observers of the training steps, so that writing about a step is no part of the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from verl.protocol import DataProto


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

    def after_step(self, number: int) -> None:
        """Called when the step has been logged, validated and saved."""
