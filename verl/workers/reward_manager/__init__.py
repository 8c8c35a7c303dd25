"""From responses to rewards."""

from verl.workers.reward_manager.naive import GradedSample, NaiveRewardManager, PendingScores, Scores
from verl.workers.reward_manager.registry import get_reward_manager_cls, register

__all__ = ["GradedSample", "NaiveRewardManager", "PendingScores", "Scores", "get_reward_manager_cls", "register"]
