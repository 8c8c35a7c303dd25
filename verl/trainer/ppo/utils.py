"""Roles of worker processes, and which of them a run needs (upstream: ``verl.trainer.ppo.utils``)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from verl.single_controller.base import Worker

WorkerType = type[Worker]


class Role(Enum):
    """What the processes of a group do; one may do several things at once."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6

    def __str__(self) -> str:
        return _NAMES[self]

    @classmethod
    def from_string(cls, name: str) -> Role:
        """The role that is written as ``actor``, ``rollout``, ``actor_rollout``, ``critic``, ``ref``, ``rm`` or
        ``actor_rollout_ref``; ValueError for another name."""
        for role, text in _NAMES.items():
            if text == name.lower():
                return role
        raise ValueError(f"No Role found for string {name!r}; expected one of {sorted(_NAMES.values())}")


_NAMES = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
}


def need_reference_policy(role_worker_mapping: Mapping[Role, WorkerType]) -> bool:
    """Whether a group of its own computes the reference's log-probs."""
    return Role.RefPolicy in role_worker_mapping


def need_reward_model(role_worker_mapping: Mapping[Role, WorkerType]) -> bool:
    """Whether a group of its own computes rewards with a model."""
    return Role.RewardModel in role_worker_mapping


def need_critic(config: Any) -> bool:
    """Whether the algorithm needs values: ``critic.enable`` if it is given, else whether the estimator is GAE."""
    critic = config.get("critic") if hasattr(config, "get") else getattr(config, "critic", None)
    enable = None if critic is None else critic.get("enable")
    if enable is not None:
        return bool(enable)
    return str(getattr(config.algorithm.adv_estimator, "value", config.algorithm.adv_estimator)) == "gae"
