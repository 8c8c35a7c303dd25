"""The table of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from torch import Tensor

from verl.utils.registry import Registry

# (token_level_rewards [B, R], response_mask [B, R], config: AlgorithmSection, index: the group of each row,
# reward_parts: each part of the reward by name, [B]), all by keyword -> (advantages, returns) [B, R]
AdvantageFn = Callable[..., tuple[Tensor, Tensor]]

ESTIMATORS: Registry[AdvantageFn] = Registry("algorithm.adv_estimator", "advantage estimator")


class AdvantageEstimator(StrEnum):
    """Names of the estimators that come with the trainer."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    GDPO = "gdpo"
    GRPO_TURNS = "grpo_turns"


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Any:
    """Decorator that makes a function available as ``algorithm.adv_estimator=name``."""
    return ESTIMATORS.register(name_or_enum)


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator of that name; ValueError lists the known ones."""
    return ESTIMATORS.get(name_or_enum)
