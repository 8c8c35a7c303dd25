"""Clip-Cov and KL-Cov (arXiv 2505.22617): what entropy loses most by is held back.

The entropy of a policy falls by the covariance of log-probs and advantages over the tokens of a batch. A few tokens
have nearly all of it: Clip-Cov takes some of them out of the loss, KL-Cov penalises how far they move. Both look at the
rows that they are given, in a run those of a micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.aggregation import agg_loss
from verl.trainer.ppo.policy_losses.registry import register_policy_loss
from verl.utils.masks import selected
from verl.workers.config import ActorConfig


@register_policy_loss("clip_cov")
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """PPO's clipped loss without some tokens of high covariance.

    Of the tokens that PPO does not clip and whose covariance lies between ``policy_loss.clip_cov_lb`` and
    ``clip_cov_ub``, at most max(1, ``clip_cov_ratio`` * tokens) have loss 0. They are drawn by a generator with a fixed
    seed, so that all ranks which share the tokens draw the same ones, and a resumed run too.
    """
    old_log_prob, log_prob, advantages = (selected(x, response_mask) for x in (old_log_prob, log_prob, advantages))
    actor = config or ActorConfig()
    policy_loss = actor.policy_loss
    ratio, approx_kl, num_tokens = _ratio_and_kl(old_log_prob, log_prob, response_mask)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - actor.clip_low, 1.0 + actor.clip_high)
    mask = response_mask > 0
    covariance = _covariance(log_prob, advantages, mask)
    is_high = (covariance > policy_loss.clip_cov_lb) & (covariance < policy_loss.clip_cov_ub)
    places = (mask & (clipped <= unclipped) & is_high).nonzero()
    count = max(int(policy_loss.clip_cov_ratio * num_tokens), 1)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0)).to(places.device)
    taken = places[order[:count]]
    keeps = torch.ones_like(log_prob)
    keeps[taken[:, 0], taken[:, 1]] = 0.0
    loss = _corrected(torch.maximum(unclipped, clipped) * keeps, rollout_is_weights, response_mask)
    metrics = {"actor/pg_clipfrac": len(taken) / max(num_tokens, 1.0), "actor/ppo_kl": approx_kl}
    return agg_loss(loss, response_mask, loss_agg_mode), metrics


@register_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """-A r, plus ``policy_loss.ppo_kl_coef`` * abs(log r) on the tokens of highest covariance.

    Those are the max(1, ``kl_cov_ratio`` * tokens) highest.
    """
    old_log_prob, log_prob, advantages = (selected(x, response_mask) for x in (old_log_prob, log_prob, advantages))
    policy_loss = (config or ActorConfig()).policy_loss
    ratio, approx_kl, num_tokens = _ratio_and_kl(old_log_prob, log_prob, response_mask)
    mask = response_mask > 0
    covariance = _covariance(log_prob, advantages, mask).masked_fill(~mask, float("-inf")).flatten()
    count = min(max(int(policy_loss.kl_cov_ratio * num_tokens), 1), int(num_tokens))
    penalised = torch.zeros_like(covariance)
    penalised[covariance.topk(count).indices] = policy_loss.ppo_kl_coef
    loss = -advantages * ratio + penalised.view_as(log_prob) * (log_prob - old_log_prob).abs()
    loss = _corrected(loss, rollout_is_weights, response_mask)
    return agg_loss(loss, response_mask, loss_agg_mode), {"actor/ppo_kl": approx_kl}


def _ratio_and_kl(old_log_prob: Tensor, log_prob: Tensor, response_mask: Tensor) -> tuple[Tensor, float, float]:
    """(exp(log_prob - old_log_prob), the mean of old less new over response tokens, their number)."""
    log_ratio = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    num_tokens = float(response_mask.sum())
    return log_ratio.exp(), float((-log_ratio.detach() * response_mask).sum()) / max(num_tokens, 1.0), num_tokens


def _covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A)(log_prob - mean log_prob), means over the tokens of ``mask``; without gradient."""
    values, log_prob = advantages.detach(), log_prob.detach()
    return (values - values[mask].mean()) * (log_prob - log_prob[mask].mean())


def _corrected(loss: Tensor, rollout_is_weights: Tensor | None, response_mask: Tensor) -> Tensor:
    return loss if rollout_is_weights is None else loss * selected(rollout_is_weights, response_mask)
