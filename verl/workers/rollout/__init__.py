"""How a worker generates responses."""

from .base import BaseRollout, get_rollout_class

__all__ = ["BaseRollout", "get_rollout_class"]
