"""Advantage estimators, one family a file, behind verl's registry."""

from verl.trainer.ppo.algos import baselines, gae, grpo, reinforce_plus_plus
from verl.trainer.ppo.algos.registry import ESTIMATORS, AdvantageEstimator, get_adv_estimator_fn, register_adv_est

__all__ = [
    "ESTIMATORS",
    "AdvantageEstimator",
    "baselines",
    "gae",
    "get_adv_estimator_fn",
    "grpo",
    "register_adv_est",
    "reinforce_plus_plus",
]
