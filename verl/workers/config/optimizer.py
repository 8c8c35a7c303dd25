"""Config of the actor's optimizer and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl.workers.config.overrides import OPTIMIZER_OVERRIDES, override_problems
from verl.workers.config.values import NOT_NEGATIVE, Section, Values, one_of


@dataclass(frozen=True)
class McoreOptimizerConfig(Section):
    """AdamW with fp32 master weights; schedule lengths count optimizer steps.

    Attributes:
        lr: highest learning rate.
        min_lr: learning rate at the end of the decay.
        weight_decay: decoupled weight decay, times the learning rate; it acts on matrices only.
        clip_grad: norm that gradients are scaled down to; 0 means no clipping.
        betas: decay of the first and of the second moment.
        adam_eps: term added to the square root of the second moment.
        lr_warmup_steps: steps of linear warm-up; -1 means ``lr_warmup_steps_ratio``.
        lr_warmup_steps_ratio: steps of linear warm-up as a share of all steps.
        lr_warmup_init: learning rate at the start of the warm-up.
        lr_decay_style: how the rate falls from ``lr`` to ``min_lr`` after the warm-up.
        lr_decay_steps: steps after which the rate is ``min_lr``; absent means the whole run.
        override_optimizer_config: where the state lives, its dtypes, and what happens to gradients that are not finite;
            its keys are below.
    """

    VALUES: ClassVar = {
        **dict.fromkeys(("lr", "min_lr", "lr_warmup_init", "weight_decay"), NOT_NEGATIVE),
        "betas": Values(
            "expected two numbers in [0, 1)", lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        ),
        "lr_decay_style": one_of("constant", "linear", "cosine"),
    }

    lr: float = 1e-6
    min_lr: float = 0.0
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    adam_eps: float = 1e-8
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    lr_warmup_init: float = 0.0
    lr_decay_style: str = "constant"
    lr_decay_steps: int | None = None
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)

    def warmup_steps(self, total_training_steps: int) -> int:
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_training_steps)

    def decay_steps(self, total_training_steps: int) -> int | None:
        """Optimizer steps after which the rate is ``min_lr``; absent means the whole run."""
        return self.lr_decay_steps or total_training_steps or None

    def schedule_problems(self, where: str, total_training_steps: int | None) -> list[str]:
        """Every contradiction between the schedule and the length of the run, one sentence each."""
        needs_total = (self.lr_warmup_steps < 0 and self.lr_warmup_steps_ratio > 0) or (
            self.lr_decay_style != "constant" and self.lr_decay_steps is None
        )
        if needs_total and total_training_steps is None:
            return [
                f"{where}: lr_warmup_steps_ratio {self.lr_warmup_steps_ratio} and lr_decay_style {self.lr_decay_style} "
                "follow the length of the run; give trainer.total_training_steps, or lr_warmup_steps and lr_decay_steps"
            ]
        warmup, decay = self.warmup_steps(total_training_steps or 0), self.decay_steps(total_training_steps or 0)
        if self.lr_decay_style != "constant" and decay is not None and decay <= warmup:
            return [f"{where}: the rate decays over {decay} steps; that must be more than the {warmup} of warm-up"]
        return []

    def contradictions(self, where: str) -> list[str]:
        starts = {"min_lr": self.min_lr, "lr_warmup_init": self.lr_warmup_init}
        found = [f"{where}.{key} {value} is above lr {self.lr}" for key, value in starts.items() if value > self.lr]
        where, given = f"{where}.override_optimizer_config", self.override_optimizer_config
        found += override_problems(where, given, OPTIMIZER_OVERRIDES)
        small = [key for key, value in given.items() if key.endswith("_dtype") and value not in (None, "fp32")]
        if small and not given.get("use_precision_aware_optimizer"):
            found.append(f"{where}: {', '.join(small)} below fp32 needs use_precision_aware_optimizer=True")
        if not given.get("optimizer_cpu_offload"):
            idle = [key for key in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d") if given.get(key)]
            found += [f"{where}.{key} does nothing without optimizer_cpu_offload=True" for key in idle]
        return found
