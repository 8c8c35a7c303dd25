"""The table of reward managers."""

from __future__ import annotations

from verl.utils.registry import Registry

MANAGERS: Registry[type] = Registry("reward_model.reward_manager", "reward manager")
REWARD_MANAGER_REGISTRY = MANAGERS.entries  # upstream's name of the table

# Class decorator that makes a manager available as ``reward_model.reward_manager=name``, and the manager of a name.
register = MANAGERS.register
get_reward_manager_cls = MANAGERS.get
