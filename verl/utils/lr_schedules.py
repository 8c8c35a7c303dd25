"""Learning rates as factors of an optimizer's own, on ``torch.optim.lr_scheduler.LambdaLR``."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """0 to 1 over ``num_warmup_steps``, then 1."""

    def factor(step: int) -> float:
        return min(1.0, step / max(1, num_warmup_steps)) if num_warmup_steps else 1.0

    return LambdaLR(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
) -> LambdaLR:
    """``init_lr_ratio`` (0) to 1 over the warm-up, then a cosine down to ``min_lr_ratio`` at ``num_training_steps``.

    ``num_cycles`` are the waves of the cosine: 0.5 ends at its lowest point.
    """
    start = 0.0 if init_lr_ratio is None else init_lr_ratio
    for name, ratio in (("min_lr_ratio", min_lr_ratio), ("init_lr_ratio", start)):
        if not 0.0 <= ratio <= 1.0:
            raise ValueError(f"{name} is {ratio}; expected 0 to 1")

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return start + (1.0 - start) * step / max(1, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress))
        return max(min_lr_ratio, min_lr_ratio + (1.0 - min_lr_ratio) * wave)

    return LambdaLR(optimizer, factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Warm-up, then 1 for ``stable_ratio`` of the remaining steps, then a cosine down to ``min_lr_ratio``."""
    remaining = max(0, num_training_steps - num_warmup_steps)
    num_stable = int(remaining * stable_ratio)
    num_decay = remaining - num_stable

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        decayed = step - num_warmup_steps - num_stable
        if decayed < 0:
            return 1.0
        if decayed >= num_decay:
            return min_lr_ratio
        wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * decayed / max(1, num_decay)))
        return min_lr_ratio + (1.0 - min_lr_ratio) * max(0.0, wave)

    return LambdaLR(optimizer, factor, last_epoch)
