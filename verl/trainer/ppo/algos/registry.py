"""The table of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from torch import Tensor

from verl.utils.registry import Registry

# (token_level_rewards [B, R], response_mask [B, R], index: the group of each row, norm_adv_by_std_in_grpo, gamma), all
# by keyword -> (advantages, returns) [B, R]
AdvantageFn = Callable[..., tuple[Tensor, Tensor]]

ESTIMATORS: Registry[AdvantageFn] = Registry("algorithm.adv_estimator", "advantage estimator")


class AdvantageEstimator(Enum):
    """Names of the estimators that come with the trainer."""

    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"


def register_adv_est(name: str | AdvantageEstimator) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator that makes an estimator available as ``algorithm.adv_estimator=name``."""
    return ESTIMATORS.register(_key(name))


def get_adv_estimator_fn(name: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator of that name; ValueError lists the known ones."""
    return ESTIMATORS.get(_key(name))


def _key(name: str | AdvantageEstimator) -> str:
    return name.value if isinstance(name, AdvantageEstimator) else name
