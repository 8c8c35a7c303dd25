"""Leave-one-out baseline (RLOO, arXiv 2402.14740)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.trainer.ppo.algos.groups import group_ids, group_sums
from verl.trainer.ppo.algos.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.RLOO)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[object], **_unused: object
) -> tuple[Tensor, Tensor]:
    """A = r - mean of the other responses to the prompt; a group of one keeps its reward. Shapes as in GRPO."""
    scores_B = token_level_rewards.sum(-1)
    sums_B, sizes_B = group_sums(scores_B, group_ids(index))
    others_B = (sums_B - scores_B) / (sizes_B - 1).clamp(min=1)
    advantages = (scores_B - others_B)[:, None] * response_mask
    return advantages, advantages
