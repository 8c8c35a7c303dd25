"""Advantages of rewards and groups without a batch around them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.step_functions import compute_advantage


def estimate_advantages(
    name: str, rewards: Tensor, mask: Tensor, groups: Any, config: AlgoConfig
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [B, R]."""
    data = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask}, {"uid": np.array([str(group) for group in groups])}
    )
    found = compute_advantage(data, name, config=config, norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo)
    return found.batch["advantages"], found.batch["returns"]
