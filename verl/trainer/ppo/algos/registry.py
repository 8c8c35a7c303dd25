"""The table of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from torch import Tensor

from verl.utils.registry import Registry

# (token_level_rewards [B, R], response_mask [B, R], index: the group of each row, norm_adv_by_std_in_grpo, gamma), all
# by keyword -> (advantages, returns) [B, R]
AdvantageFn = Callable[..., tuple[Tensor, Tensor]]

ESTIMATORS: Registry[AdvantageFn] = Registry("algorithm.adv_estimator", "advantage estimator")


class AdvantageEstimator(StrEnum):
    """Names of the estimators that come with the trainer."""

    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"


# Decorator that makes an estimator available as ``algorithm.adv_estimator=name``, and the estimator of a name.
register_adv_est = ESTIMATORS.register
get_adv_estimator_fn = ESTIMATORS.get
