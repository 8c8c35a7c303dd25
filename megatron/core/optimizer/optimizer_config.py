"""Hyper-parameters of the optimizer, under upstream's field names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with clipping by the global norm.

    lr is what a run without scheduler uses; with one, the scheduler sets the rate of each step and min_lr is its lower
    end. clip_grad 0 means no clipping. weight_decay acts on matrices only, not on norm weights and biases.
    on_non_finite_grads (ours): "skip" the step when the gradient norm is NaN or infinite, or "stop" the run.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = True
    on_non_finite_grads: str = "skip"

    def __post_init__(self) -> None:
        found = [
            f"{name} is {getattr(self, name)}; it must be at least 0"
            for name in ("lr", "min_lr", "weight_decay", "clip_grad")
            if not getattr(self, name) >= 0
        ]
        if self.min_lr > self.lr:
            found.append(f"min_lr is {self.min_lr}; it must not be above lr {self.lr}")
        found.extend(
            f"{name} is {getattr(self, name)}; it must be in [0, 1)"
            for name in ("adam_beta1", "adam_beta2")
            if not 0 <= getattr(self, name) < 1
        )
        if not self.adam_eps > 0:
            found.append(f"adam_eps is {self.adam_eps}; it must be above 0")
        if self.on_non_finite_grads not in ("skip", "stop"):
            found.append(f"on_non_finite_grads is {self.on_non_finite_grads!r}; it must be 'skip' or 'stop'")
        if found:
            raise ValueError("optimizer config: " + "; ".join(found))
