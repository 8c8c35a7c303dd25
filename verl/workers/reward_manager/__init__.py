"""From responses to rewards."""

from verl.workers.reward_manager.naive import NaiveRewardManager, PendingScores
from verl.workers.reward_manager.registry import get_reward_manager_cls, register

__all__ = ["NaiveRewardManager", "PendingScores", "get_reward_manager_cls", "register"]
