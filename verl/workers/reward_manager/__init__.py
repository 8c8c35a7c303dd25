"""From responses to rewards."""

from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.batch import BatchRewardManager
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.pooled import GradedSample, PendingScores, PooledRewardManager, Scores
from verl.workers.reward_manager.prime import PrimeRewardManager
from verl.workers.reward_manager.registry import MANAGERS, get_reward_manager_cls, register

__all__ = [
    "MANAGERS",
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "GradedSample",
    "NaiveRewardManager",
    "PendingScores",
    "PooledRewardManager",
    "PrimeRewardManager",
    "Scores",
    "get_reward_manager_cls",
    "register",
]
