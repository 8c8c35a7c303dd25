"""The learning rate as a function of the step: linear warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

import math
from typing import Protocol

DECAY_STYLES = ("constant", "linear", "cosine")


class HasParamGroups(Protocol):
    """The part of an optimizer that the scheduler needs."""

    param_groups: list[dict[str, float]]


class OptimizerParamScheduler:
    """Sets ``lr`` in all parameter groups of ``optimizer``, at once for step 0 and then after every ``step()``.

    With n steps done: lr = init_lr + (max_lr - init_lr) * n / warmup for n <= warmup (when there is a warm-up); then
    max_lr (constant), or min_lr + (max_lr - min_lr) * c(r) with r = (n - warmup) / (decay - warmup), c(r) = 1 - r
    (linear) or (1 + cos(pi r)) / 2 (cosine); min_lr after ``lr_decay_steps``, which count from the start.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        *,
        max_lr: float,
        min_lr: float = 0.0,
        init_lr: float = 0.0,
        lr_warmup_steps: int = 0,
        lr_decay_steps: int | None = None,
        lr_decay_style: str = "constant",
    ) -> None:
        problems = []
        if lr_decay_style not in DECAY_STYLES:
            problems.append(f"lr_decay_style is {lr_decay_style!r}; use one of {', '.join(DECAY_STYLES)}")
        if not 0 <= min_lr <= max_lr or not 0 <= init_lr <= max_lr:
            problems.append(f"min_lr {min_lr} and init_lr {init_lr} must be in 0..max_lr {max_lr}")
        if lr_warmup_steps < 0:
            problems.append(f"lr_warmup_steps is {lr_warmup_steps}; it must be at least 0")
        if lr_decay_style != "constant" and (lr_decay_steps is None or lr_decay_steps <= lr_warmup_steps):
            problems.append(f"lr_decay_steps is {lr_decay_steps}; it must be above lr_warmup_steps {lr_warmup_steps}")
        if problems:
            raise ValueError("learning-rate schedule: " + "; ".join(problems))
        self.optimizer = optimizer
        self.max_lr, self.min_lr, self.init_lr = max_lr, min_lr, init_lr
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = lr_warmup_steps, lr_decay_steps, lr_decay_style
        self.num_steps = 0
        self._apply()

    def get_lr(self) -> float:
        if self.lr_warmup_steps > 0 and self.num_steps <= self.lr_warmup_steps:
            return self.init_lr + (self.max_lr - self.init_lr) * self.num_steps / self.lr_warmup_steps
        if self.lr_decay_style == "constant" or self.lr_decay_steps is None:
            return self.max_lr
        if self.num_steps >= self.lr_decay_steps:
            return self.min_lr
        done = (self.num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        kept = 1.0 - done if self.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.max_lr - self.min_lr) * kept

    def step(self, increment: int = 1) -> None:
        """Count ``increment`` finished steps and set the rate of the next."""
        self.num_steps += increment
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """Only the position: the shape of the schedule is the config's."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.num_steps = int(state_dict["num_steps"])
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()
