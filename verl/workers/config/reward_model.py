"""Knobs of reward scoring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardModelConfig:
    """The pool of scoring processes: ``timeout_s`` is the wall-clock limit of one sample."""

    reward_manager: str = "naive"
    num_workers: int = 2
    timeout_s: float = 10.0

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work, one sentence each."""
        found = []
        if self.num_workers < 1:
            found.append(f"{where}.num_workers is {self.num_workers}; it must be at least 1")
        if self.timeout_s <= 0:
            found.append(f"{where}.timeout_s is {self.timeout_s}; it must be above 0")
        return found


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    """A reward function by file: ``name(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)``."""

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
