"""From responses to rewards."""

from verl.workers.reward_manager.naive import GradedSample, NaiveRewardManager, PendingScores, Scores
from verl.workers.reward_manager.registry import MANAGERS, get_reward_manager_cls, register

__all__ = [
    "MANAGERS",
    "GradedSample",
    "NaiveRewardManager",
    "PendingScores",
    "Scores",
    "get_reward_manager_cls",
    "register",
]
