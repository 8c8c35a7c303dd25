"""What a reward manager of a user derives from, and the decorator that gives it a name."""

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.workers.reward_manager.registry import get_reward_manager_cls, register

__all__ = ["RewardManagerBase", "get_reward_manager_cls", "register"]
