"""Upstream's names of the algorithms, and what of them the trainer itself does not need.

Advantages are one family a file in ``algos``, policy losses one file each in ``policy_losses``, KL estimates in ``kl``,
aggregation in ``aggregation``; all are reached from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.trainer.ppo.aggregation import agg_loss, token_loss_weights
from verl.trainer.ppo.algos import ESTIMATORS, AdvantageEstimator, get_adv_estimator_fn, register_adv_est
from verl.trainer.ppo.algos.baselines import (
    compute_gpg_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from verl.trainer.ppo.algos.gae import compute_gae_advantage_return
from verl.trainer.ppo.algos.grpo import (
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
)
from verl.trainer.ppo.algos.reinforce_plus_plus import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from verl.trainer.ppo.kl import (
    AdaptiveKLController,
    FixedKLController,
    get_kl_controller,
    kl_penalty,
    kl_penalty_forward,
)
from verl.trainer.ppo.policy_losses import LOSSES, PolicyLossFn, get_policy_loss_fn, register_policy_loss
from verl.trainer.ppo.policy_losses.cispo import compute_policy_loss_cispo
from verl.trainer.ppo.policy_losses.covariance import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from verl.trainer.ppo.policy_losses.geo_mean import compute_policy_loss_geo_mean
from verl.trainer.ppo.policy_losses.gpg import compute_policy_loss_gpg
from verl.trainer.ppo.policy_losses.gspo import compute_policy_loss_gspo
from verl.trainer.ppo.policy_losses.vanilla import compute_policy_loss_vanilla
from verl.trainer.ppo.rollout_corr_helper import compute_policy_loss_with_rollout_correction
from verl.utils.errors import BatchError
from verl.utils.import_utils import deprecated
from verl.utils.masks import row_rewards, selected

if TYPE_CHECKING:
    from verl.protocol import DataProto

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "PolicyLossFn",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_pf_ppo_reweight_data",
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_vanilla",
    "compute_policy_loss_with_rollout_correction",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "kl_penalty_forward",
    "register_adv_est",
    "register_policy_loss",
    "token_loss_weights",
]


ADV_ESTIMATOR_REGISTRY = ESTIMATORS.entries
POLICY_LOSS_REGISTRY = LOSSES.entries


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float | Tensor
) -> Tensor:
    """The scores less ``kl_ratio`` times log p - log q, per token [B, R]."""
    return token_level_scores - (old_log_prob - ref_log_prob) * kl_ratio


@deprecated("verl.trainer.ppo.core_algos.compute_policy_loss_vanilla")
def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The older form of ``compute_policy_loss_vanilla``, with the clip ratios as arguments.

    Returns:
        (loss, share of clipped tokens, mean of old less new log-prob, share of tokens at the dual clip's bound).
    """
    if clip_ratio_c <= 1.0:
        raise BatchError(f"clip_ratio_c is {clip_ratio_c}; the dual clip's bound must be above 1")
    config = {
        "clip_ratio": 0.2 if cliprange is None else cliprange,
        "clip_ratio_low": cliprange_low,
        "clip_ratio_high": cliprange_high,
        "clip_ratio_c": clip_ratio_c,
    }
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    clipfrac, kl, lower = (loss.new_tensor(metrics[name]) for name in names)
    return loss, clipfrac, kl, lower


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """The aggregated entropy of the distributions ``logits`` [B, R, V]."""
    log_probs = selected(logits, response_mask.unsqueeze(-1)).log_softmax(-1)
    return agg_loss(-(log_probs.exp() * log_probs).sum(-1), response_mask, loss_agg_mode)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """(max((v - G)^2, (clip(v, V - c, V + c) - G)^2) / 2 aggregated, the share of tokens where the clipped one counts).

    v are the predictions that learn, V (``values``) those of the step's start, G the returns; all fp32 [B, R].
    """
    vpreds, returns, values = (selected(each, response_mask) for each in (vpreds, returns, values))
    clipped = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    plain_loss, clipped_loss = (vpreds - returns).square(), (clipped - returns).square()
    mask = response_mask.to(vpreds.dtype)
    loss = 0.5 * agg_loss(torch.maximum(plain_loss, clipped_loss), mask, loss_agg_mode)
    return loss, ((clipped_loss > plain_loss) * mask).sum() / mask.sum().clamp(min=1)


def compute_pf_ppo_reweight_data(data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0) -> DataProto:
    """As many rows again, drawn with replacement by a weight of their score (PF-PPO, arXiv 2409.06957).

    ``pow``: abs(score) ** ``weight_pow``. ``max_min``: 1 for the highest and the lowest score, else 0. ``max_random``:
    0.4 for the highest score, else 0.1. The draw takes torch's global generator.
    """
    scores_BR = data.batch["token_level_scores"]
    scores_B = row_rewards(scores_BR, data.batch.get("response_mask", torch.ones_like(scores_BR)))
    is_best, is_worst = scores_B == scores_B.max(), scores_B == scores_B.min()
    if reweight_method == "pow":
        weights_B = scores_B.abs().pow(weight_pow)
    elif reweight_method == "max_min":
        weights_B = (is_best | is_worst).to(scores_B.dtype)
    elif reweight_method == "max_random":
        weights_B = torch.where(is_best, 0.4, 0.1)
    else:
        raise ValueError(f"pf_ppo.reweight_method is {reweight_method!r}; expected pow, max_min or max_random")
    rows = torch.multinomial(weights_B + 1e-8, len(scores_B), replacement=True)
    return data.select_idxs(rows)
