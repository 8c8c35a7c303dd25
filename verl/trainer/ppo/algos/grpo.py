"""Group-relative advantages (GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.trainer.ppo.algos.groups import group_ids, group_sums
from verl.trainer.ppo.algos.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[object],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    **_unused: object,
) -> tuple[Tensor, Tensor]:
    """A = (r - mean_group) / (std_group + epsilon) on every response token; r is the sum of a row's rewards.

    The standard deviation is the unbiased one. A group of one keeps its reward (mean 0, std 1). Without
    ``norm_adv_by_std_in_grpo`` the division is left out (Dr. GRPO).

    Args:
        token_level_rewards, response_mask: fp32 [B, R].
        index: group key of every row.

    Returns:
        (advantages, returns), both fp32 [B, R] and equal.
    """
    scores_B = token_level_rewards.sum(-1).double()
    ids_B = group_ids(index)
    sums_B, sizes_B = group_sums(scores_B, ids_B)
    is_single = sizes_B == 1
    centred_B = scores_B - torch.where(is_single, torch.zeros_like(sums_B), sums_B / sizes_B)
    if norm_adv_by_std_in_grpo:
        squares_B, _ = group_sums((scores_B - sums_B / sizes_B).square(), ids_B)
        std_B = (squares_B / (sizes_B - 1).clamp(min=1)).sqrt()
        centred_B = centred_B / (torch.where(is_single, torch.ones_like(std_B), std_B) + epsilon)
    advantages = centred_B.to(token_level_rewards.dtype)[:, None] * response_mask
    return advantages, advantages
