"""REINFORCE++ (arXiv 2501.03262): whitened over the batch, plainly or with a group baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.algos.groups import GroupIndex, group_ids, group_sums, whitened
from verl.trainer.ppo.algos.registry import AdvantageEstimator, register_adv_est
from verl.utils.masks import row_rewards, selected


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: object
) -> tuple[Tensor, Tensor]:
    """Returns G_t = r_t + gamma G_{t+1} on every response token, whitened over all of them. Shapes as in GRPO.

    gamma is ``config.gamma``, without a config 1.
    """
    gamma = 1.0 if config is None else config.gamma
    token_level_rewards = selected(token_level_rewards, response_mask)
    returns = torch.zeros_like(token_level_rewards)
    running = token_level_rewards.new_zeros(token_level_rewards.shape[0])
    for t in reversed(range(token_level_rewards.shape[1])):
        running = (token_level_rewards[:, t] + gamma * running) * response_mask[:, t]
        returns[:, t] = running
    return whitened(returns, response_mask), returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """r - mean_group on every response token, then whitened over all response tokens. Shapes as in GRPO.

    A group of one keeps its reward, as upstream: less its own mean it would never teach anything. ``epsilon`` and
    ``config`` are not read.
    """
    scores_B = row_rewards(token_level_rewards, response_mask)
    sums_B, sizes_B = group_sums(scores_B, group_ids(index))
    means_B = torch.where(sizes_B == 1, torch.zeros_like(sums_B), sums_B / sizes_B)
    advantages = whitened((scores_B - means_B)[:, None] * response_mask, response_mask)
    return advantages, advantages
