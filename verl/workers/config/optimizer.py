"""Config of the actor's optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.workers.config.keys import NOT_NEGATIVE, Idle, Section, Values, beside, key, one_of
from verl.workers.config.overrides import OPTIMIZER_OVERRIDES

_CONSTANT = beside("lr_decay_style", "constant")
_COUNTED = Idle("{where}.lr_warmup_steps counts", lambda run, own: own.lr_warmup_steps >= 0)
_NO_WARMUP = Idle("the learning rate is not warmed up", lambda run, own: own.warmup_steps(1 << 30) == 0)
_PAIR = Values("expected two numbers in [0, 1)", lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas))


@dataclass(frozen=True)
class McoreOptimizerConfig(Section):
    """AdamW with fp32 master weights; schedule lengths count optimizer steps."""

    lr: float = key(1e-6, NOT_NEGATIVE)  #: highest learning rate.
    #: learning rate at the end of the decay.
    min_lr: float = key(0.0, NOT_NEGATIVE, _CONSTANT, names={"0.9.0": "lr_min"})
    #: decoupled weight decay, times the learning rate; it acts on matrices only.
    weight_decay: float = key(0.01, NOT_NEGATIVE)
    #: norm that gradients are scaled down to; 0 means no clipping.
    clip_grad: float = key(1.0, names={"0.9.0": "../grad_clip"})
    betas: list[float] = key(lambda: [0.9, 0.999], _PAIR)  #: decay of the first and of the second moment.
    #: term added to the square root of the second moment.
    adam_eps: float = key(1e-8, names={"0.9.0": "eps"})
    lr_warmup_steps: int = -1  #: steps of linear warm-up; -1 means ``lr_warmup_steps_ratio``.
    lr_warmup_steps_ratio: float = key(0.0, _COUNTED)  #: steps of linear warm-up as a share of all steps.
    #: learning rate at the start of the warm-up.
    lr_warmup_init: float = key(0.0, NOT_NEGATIVE, _NO_WARMUP, names={"0.9.0": "lr_start"})
    #: how the rate falls from ``lr`` to ``min_lr`` after the warm-up.
    lr_decay_style: str = key(
        "constant",
        one_of("constant", "linear", "cosine"),
        names={"0.6.1": "warmup_style", "0.9.0": "lr_scheduler_type"},
    )
    #: steps after which the rate is ``min_lr``; absent means the whole run.
    lr_decay_steps: int | None = key(None, _CONSTANT)
    #: where the state lives, its dtypes, and what happens to gradients that are not finite; its keys are below.
    override_optimizer_config: dict[str, Any] = key(dict, members=OPTIMIZER_OVERRIDES)

    def warmup_steps(self, total_training_steps: int) -> int:
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_training_steps)

    def decay_steps(self, total_training_steps: int) -> int | None:
        """Optimizer steps after which the rate is ``min_lr``; absent means the whole run."""
        return self.lr_decay_steps or total_training_steps or None

    def schedule_problems(self, where: str, total_training_steps: int | None) -> Iterator[str]:
        """Every contradiction between the schedule and the length of the run, one sentence each."""
        needs_total = (self.lr_warmup_steps < 0 and self.lr_warmup_steps_ratio > 0) or (
            self.lr_decay_style != "constant" and self.lr_decay_steps is None
        )
        if needs_total and total_training_steps is None:
            yield (
                f"{where}: lr_warmup_steps_ratio {self.lr_warmup_steps_ratio} and lr_decay_style {self.lr_decay_style} "
                "follow the length of the run; give trainer.total_training_steps, or lr_warmup_steps and lr_decay_steps"
            )
            return
        warmup, decay = self.warmup_steps(total_training_steps or 0), self.decay_steps(total_training_steps or 0)
        if self.lr_decay_style != "constant" and decay is not None and decay <= warmup:
            yield f"{where}: the rate decays over {decay} steps; that must be more than the {warmup} of warm-up"

    def contradictions(self, where: str) -> Iterator[str]:
        for name, value in (("min_lr", self.min_lr), ("lr_warmup_init", self.lr_warmup_init)):
            if value > self.lr:
                yield f"{where}.{name} {value} is above lr {self.lr}"
        where, given = f"{where}.override_optimizer_config", self.override_optimizer_config
        small = [key for key, value in given.items() if key.endswith("_dtype") and value not in (None, "fp32")]
        if small and not given.get("use_precision_aware_optimizer"):
            yield f"{where}: {', '.join(small)} below fp32 needs use_precision_aware_optimizer=True"
