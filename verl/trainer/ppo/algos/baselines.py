"""Rewards less a baseline of the prompt: RLOO, OPO, GPG and ReMax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.algos.groups import GroupIndex, group_ids, group_sums
from verl.trainer.ppo.algos.registry import AdvantageEstimator, register_adv_est
from verl.utils.masks import row_rewards, selected


@register_adv_est(AdvantageEstimator.RLOO)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """A = r - mean of the other responses to the prompt (RLOO, arXiv 2402.14740); a group of one keeps its reward.

    ``epsilon`` and ``config`` are not read. Shapes as in GRPO.
    """
    scores_B = row_rewards(token_level_rewards, response_mask)
    sums_B, sizes_B = group_sums(scores_B, group_ids(index))
    others_B = (sums_B - scores_B) / (sizes_B - 1).clamp(min=1)
    advantages = (scores_B - others_B)[:, None] * response_mask
    return advantages, advantages


# Upstream's second name for it: there is no loop over rows here either.
compute_rloo_vectorized_outcome_advantage = register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)(
    compute_rloo_outcome_advantage
)


@register_adv_est(AdvantageEstimator.OPO)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """A = r - sum(length * r) / sum(length) over the prompt's responses (OPO, arXiv 2505.23585).

    That is the baseline with the least variance of the gradient if its norm grows with the length. A group of one keeps
    its reward. ``epsilon`` and ``config`` are not read. Shapes as in GRPO.
    """
    scores_B = row_rewards(token_level_rewards, response_mask)
    lengths_B = response_mask.sum(-1).to(token_level_rewards.dtype)
    ids_B = group_ids(index)
    weighted_B, sizes_B = group_sums(scores_B * lengths_B, ids_B)
    total_B, _ = group_sums(lengths_B, ids_B)
    baselines_B = torch.where(sizes_B == 1, torch.zeros_like(scores_B), weighted_B / total_B.clamp(min=1))
    advantages = (scores_B - baselines_B)[:, None] * response_mask
    return advantages, advantages


@register_adv_est(AdvantageEstimator.GPG)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """A = alpha * B / M * (r - mean_group) / f_norm (GPG, arXiv 2504.02546), M of the B rewards being other than 0.

    B / M makes up for the samples that teach nothing, as upstream counts them. A group of one keeps its reward.
    ``epsilon`` and ``config`` are not read. Shapes as in GRPO.
    """
    scores_B = row_rewards(token_level_rewards, response_mask)
    sums_B, sizes_B = group_sums(scores_B, group_ids(index))
    means_B = torch.where(sizes_B == 1, torch.zeros_like(sums_B), sums_B / sizes_B)
    scale = alpha * len(scores_B) / max(int(torch.count_nonzero(scores_B)), 1)
    advantages = (scale * (scores_B - means_B) / f_norm)[:, None] * response_mask
    return advantages, advantages


@register_adv_est(AdvantageEstimator.REMAX)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: object
) -> tuple[Tensor, Tensor]:
    """A = (sum of the rewards from a token on) - reward of the greedy response (ReMax, arXiv 2310.10505).

    Args:
        token_level_rewards, response_mask: fp32 [B, R].
        reward_baselines: the reward of the greedy response to each row's prompt, [B].
        config: not read.

    Returns:
        (advantages, returns) fp32 [B, R]; returns are the sums.
    """
    returns = (selected(token_level_rewards, response_mask) * response_mask).flip(-1).cumsum(-1).flip(-1)
    return returns - reward_baselines[:, None] * response_mask, returns
