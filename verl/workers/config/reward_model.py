"""Knobs of reward scoring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft overlong punishment, in training: the last ``len`` tokens that a response may have cost reward.

    len: tokens at the end of ``data.max_response_length`` · penalty_factor: what a response of the full length loses ·
    log: show the penalty and the share of such responses among the metrics.
    """

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0
    log: bool = False

    def problems(self, where: str, max_response_length: int) -> list[str]:
        """Every value that cannot work, one sentence each."""
        if not self.enable:
            return []
        found = []
        if not 1 <= self.len <= max_response_length:
            found.append(
                f"{where}.len is {self.len}; expected 1 to data.max_response_length ({max_response_length}) tokens"
            )
        if self.penalty_factor < 0:
            found.append(f"{where}.penalty_factor is {self.penalty_factor}; it must not be negative, it is subtracted")
        return found


@dataclass(frozen=True)
class RewardModelConfig:
    """The pool of scoring processes: ``timeout_s`` is the wall-clock limit of one sample."""

    reward_manager: str = "naive"
    num_workers: int = 2
    timeout_s: float = 10.0
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)

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
