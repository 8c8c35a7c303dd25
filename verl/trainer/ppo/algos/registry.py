"""The table of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from torch import Tensor

# (token_level_rewards [B, R], response_mask [B, R], group index per row, norm_by_std) -> (advantages, returns) [B, R]
AdvantageFn = Callable[..., tuple[Tensor, Tensor]]

_ESTIMATORS: dict[str, AdvantageFn] = {}


class AdvantageEstimator(Enum):
    """Names of the estimators that come with the trainer."""

    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"


def register_adv_est(name: str | AdvantageEstimator) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator that makes an estimator known as ``algorithm.adv_estimator=name``; a name can be taken once."""
    key = name.value if isinstance(name, AdvantageEstimator) else name

    def register(function: AdvantageFn) -> AdvantageFn:
        taken = _ESTIMATORS.setdefault(key, function)
        if taken is not function:
            raise ValueError(f"advantage estimator {key!r} is registered already, by {taken.__module__}")
        return function

    return register


def get_adv_estimator_fn(name: str | AdvantageEstimator) -> AdvantageFn:
    """The estimator of that name; ValueError lists the known ones."""
    key = name.value if isinstance(name, AdvantageEstimator) else name
    if key not in _ESTIMATORS:
        raise ValueError(f"algorithm.adv_estimator is {key!r}; known: {', '.join(sorted(_ESTIMATORS))}")
    return _ESTIMATORS[key]
