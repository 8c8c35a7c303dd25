"""Advantage estimators, one file each, behind verl's registry."""

from verl.trainer.ppo.algos import grpo, reinforce_plus_plus, rloo
from verl.trainer.ppo.algos.registry import (
    ESTIMATORS,
    AdvantageEstimator,
    get_adv_estimator_fn,
    register_adv_est,
)

__all__ = [
    "ESTIMATORS",
    "AdvantageEstimator",
    "get_adv_estimator_fn",
    "grpo",
    "register_adv_est",
    "reinforce_plus_plus",
    "rloo",
]
