"""``common.json`` of a checkpoint: the state that is equal on all ranks, and what the checkpoint holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

COMMON = "common.json"
CONTENTS = ("model", "optimizer", "extra")


def common_state(
    optimizer: DistributedOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    extra: Mapping[str, Any],
    random_states: bool,
) -> dict[str, Any]:
    """Scalars of the optimizer, the scheduler's state, the caller's ``extra``, and the list of contents.

    ``extra`` among the contents means scheduler and random states, as in verl's ``checkpoint.save_contents``.
    """
    scalars = {} if optimizer is None else optimizer.state_dict()
    is_held = {"model": True, "optimizer": optimizer is not None, "extra": scheduler is not None and random_states}
    return {
        "contents": [name for name in CONTENTS if is_held[name]],
        "optimizer": {key: value for key, value in scalars.items() if not isinstance(value, Tensor)},
        "scheduler": {} if scheduler is None else scheduler.state_dict(),
        "extra": dict(extra),
    }


def read_common(directory: Path) -> dict[str, Any]:
    """What ``common_state`` returned when the checkpoint was saved."""
    common: dict[str, Any] = json.loads((directory / COMMON).read_text())
    return common


def saved_contents(directory: str | os.PathLike[str]) -> tuple[str, ...]:
    """Which of ``model``, ``optimizer`` and ``extra`` (scheduler, random states) a complete checkpoint holds.

    Checkpoints from before the list was written hold everything.
    """
    return tuple(read_common(Path(directory)).get("contents", CONTENTS))
