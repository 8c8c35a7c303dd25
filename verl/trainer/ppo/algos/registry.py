"""The table of advantage estimators."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from torch import Tensor

from verl.trainer.ppo.algos.groups import GroupIndex
from verl.utils.registry import Registry

# (token_level_rewards [B, R], response_mask [B, R], config: AlgorithmSection, index: the group of each row), all by
# keyword -> (advantages, returns) [B, R]
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


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Any:
    """Decorator that makes a function available as ``algorithm.adv_estimator=name``."""
    return ESTIMATORS.register(name_or_enum)


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator of that name; ValueError lists the known ones."""
    return ESTIMATORS.get(name_or_enum)


def estimate_advantages(
    name: str, token_level_rewards: Tensor, response_mask: Tensor, index: GroupIndex, config: Any
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [B, R] of a registered estimator, which gets those of the arguments that it names.

    ``config`` is the section ``algorithm``; one of its keys is also an argument, where the estimator has one of that
    name: ``norm_adv_by_std_in_grpo``.
    """
    estimate = get_adv_estimator_fn(name)
    given = {
        "token_level_rewards": token_level_rewards,
        "response_mask": response_mask,
        "index": index,
        "config": config,
        "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
    }
    parameters = inspect.signature(estimate).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters}
    return estimate(**given)
