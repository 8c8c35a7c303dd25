"""Generalized advantage estimation (GAE, arXiv 1506.02438), for callers with a critic: the trainer has none."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.algos.groups import whitened
from verl.trainer.ppo.algos.registry import AdvantageEstimator, register_adv_est
from verl.utils.masks import selected


@register_adv_est(AdvantageEstimator.GAE)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float | Tensor, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t; then whitened over all response tokens.

    Tokens outside ``response_mask``, such as a tool's answer between two turns, are passed over: t + 1 is the next
    response token.

    Args:
        token_level_rewards, values, response_mask: fp32 [B, R].
        gamma, lam: the discounts of rewards and of differences.

    Returns:
        (advantages, returns) fp32 [B, R]; returns are A + V before whitening.
    """
    next_value = values.new_zeros(values.shape[0])
    running = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        is_response = response_mask[:, t] > 0
        delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(is_response, delta + gamma * lam * running, running)
        next_value = torch.where(is_response, values[:, t], next_value)
        advantages[:, t] = running
    return whitened(advantages, response_mask), advantages + selected(values, response_mask)
