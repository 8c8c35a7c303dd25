"""Group-relative advantages: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783), Pass@k (2503.19595), GDPO (2601.05242)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.trainer.ppo.algos.groups import GroupIndex, group_ids, group_sums
from verl.trainer.ppo.algos.registry import AdvantageEstimator, register_adv_est
from verl.utils.masks import finite_outside, row_rewards

if TYPE_CHECKING:  # the package of the config needs Hydra, which a machine for measurements lacks
    from verl.trainer.config.algorithm import AlgorithmSection


@register_adv_est(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """A = (r - mean_group) / (std_group + epsilon) on every response token; r is the sum of a row's rewards.

    The standard deviation is the unbiased one. A group of one keeps its reward (mean 0, std 1). Without
    ``norm_adv_by_std_in_grpo`` the division is left out (Dr. GRPO).

    Args:
        token_level_rewards, response_mask: fp32 [B, R].
        index: group key of every row.
        config: not read.

    Returns:
        (advantages, returns), both fp32 [B, R] and equal.
    """
    scores_B = row_rewards(token_level_rewards, response_mask).double()
    centred_B = _centred(scores_B, group_ids(index), epsilon if norm_adv_by_std_in_grpo else None)
    advantages = centred_B.to(token_level_rewards.dtype)[:, None] * response_mask
    return advantages, advantages


# Upstream's second name for it: there is no loop over rows here either.
compute_grpo_vectorized_outcome_advantage = register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)(
    compute_grpo_outcome_advantage
)


@register_adv_est(AdvantageEstimator.GRPO_TURNS)
@torch.no_grad()
def compute_grpo_turn_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """A of a turn = sum over it and later turns of (r - mean) / (std + epsilon), over all turns of a prompt's samples.

    It is GRPO with process supervision (2402.03300, 4.1.3), for rewards of every turn; r is the sum of a turn's
    rewards, and a turn is a run of tokens that the model wrote. Shapes as in ``compute_grpo_outcome_advantage``, whose
    result it has where every sample is one turn.
    """
    is_sampled_BR = response_mask > 0
    begins_BR = is_sampled_BR & ~F.pad(is_sampled_BR, (1, 0))[:, :-1]
    turns_BR = (begins_BR.cumsum(-1) - 1).clamp(min=0)
    num_turns_B1 = begins_BR.sum(-1, keepdim=True)
    has_BT = torch.arange(max(1, int(num_turns_B1.max()))) < num_turns_B1
    rewards_BT = torch.zeros(has_BT.shape, dtype=torch.float64)
    rewards_BT.scatter_add_(1, turns_BR, finite_outside(token_level_rewards, response_mask).double() * response_mask)
    ids_BT = group_ids(index)[:, None].expand_as(has_BT)
    centred_BT = torch.zeros_like(rewards_BT)
    centred_BT[has_BT] = _centred(rewards_BT[has_BT], ids_BT[has_BT], epsilon if norm_adv_by_std_in_grpo else None)
    to_go_BT = centred_BT.flip(-1).cumsum(-1).flip(-1)
    advantages = to_go_BT.gather(1, turns_BR).to(token_level_rewards.dtype) * response_mask
    return advantages, advantages


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """A = (best - second best of the group) / (std_group + epsilon) for the best response, 0 for the others.

    Of several best ones the first counts, and gets 0. ``config.norm_adv_by_std_in_grpo=False`` leaves the division out
    as well. A group of one is a ValueError. Shapes as in ``compute_grpo_outcome_advantage``.
    """
    scores_B = row_rewards(token_level_rewards, response_mask).double()
    ids_B = group_ids(index)
    values_B = torch.zeros_like(scores_B)
    for group in range(int(ids_B.max()) + 1):
        rows = (ids_B == group).nonzero()[:, 0]
        if len(rows) < 2:
            raise ValueError(
                f"grpo_passk compares the two best responses to a prompt, but prompt {group} of the batch has "
                f"{len(rows)}; set actor_rollout_ref.rollout.n to 2 or more"
            )
        best, second = scores_B[rows].topk(2).values
        values_B[rows[scores_B[rows].argmax()]] = best - second
    if norm_adv_by_std_in_grpo and (config is None or config.norm_adv_by_std_in_grpo):
        values_B = values_B / (_std(scores_B, ids_B) + epsilon)
    advantages = values_B.to(token_level_rewards.dtype)[:, None] * response_mask
    return advantages, advantages


@register_adv_est(AdvantageEstimator.GDPO)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: GroupIndex,
    reward_parts: Mapping[str, np.ndarray],
    config: AlgorithmSection,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """A = (S - mean S) / (std S + epsilon) over the batch's responses, S = sum over k of A_k (equations 4-6).

    A_k is GRPO's advantage from the part k of the reward alone, for the k of ``config.gdpo_reward_keys``. A response
    that lacks a part, as when its grader failed, has 0 of it. The paper's statistics over the batch are those of
    responses; verl's v0.9.0 takes them over tokens, where long responses count more.
    Shapes as in ``compute_grpo_outcome_advantage``.
    """
    ids_B, total_B = group_ids(index), torch.zeros(len(response_mask), dtype=torch.float64)
    for name in config.gdpo_reward_keys:
        if np.isnan(reward_parts.get(name, np.nan)).all():
            known = ", ".join(sorted(reward_parts))
            raise ValueError(f"algorithm.gdpo_reward_keys has {name!r}; the parts of the reward are {known}")
        total_B += _centred(torch.from_numpy(np.nan_to_num(reward_parts[name])).double(), ids_B, epsilon)
    total_B = _centred(total_B, torch.zeros_like(ids_B), epsilon)
    advantages = total_B.to(token_level_rewards.dtype)[:, None] * response_mask
    return advantages, advantages


def _centred(scores_B: Tensor, ids_B: Tensor, epsilon: float | None) -> Tensor:
    """Scores less their group's mean, over its standard deviation unless ``epsilon`` is None; a single one stays."""
    sums_B, sizes_B = group_sums(scores_B, ids_B)
    is_single = sizes_B == 1
    centred_B = scores_B - torch.where(is_single, torch.zeros_like(sums_B), sums_B / sizes_B)
    if epsilon is None:
        return centred_B
    return centred_B / (torch.where(is_single, torch.ones_like(sums_B), _std(scores_B, ids_B)) + epsilon)


def _std(scores_B: Tensor, ids_B: Tensor) -> Tensor:
    """The unbiased standard deviation of every row's group, 0 for a group of one."""
    sums_B, sizes_B = group_sums(scores_B, ids_B)
    squares_B, _ = group_sums((scores_B - sums_B / sizes_B).square(), ids_B)
    return (squares_B / (sizes_B - 1).clamp(min=1)).sqrt()
