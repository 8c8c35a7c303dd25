"""GMPO, geometric-mean policy optimization (arXiv 2507.20673): tokens are clipped, the ratio is the sequence's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.policy_losses.registry import (
    SequenceMean,
    TokenLosses,
    aggregated,
    clamped_log_ratio,
    computed_by_token,
    register_policy_loss,
)
from verl.workers.config import ActorConfig

AGGREGATION = "seq-mean-token-mean"


def token_losses(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: ActorConfig, sequence_mean: SequenceMean
) -> TokenLosses:
    """L_t = -A sg[s] exp(c_t - sg[c_t]), s = exp(mean of c over the sequence), A the mean of its advantages.

    c_t = log r_t, which for A_t > 0 is cut at ``clip_ratio_high`` and otherwise at -``clip_ratio_low``: the paper clips
    r to (e^-low, e^high), with low = high = 0.4. The mean of L_t over the tokens has value and gradient of the
    sequence's loss -A s.
    """
    log_ratio = clamped_log_ratio(old_log_prob, log_prob)
    cut = torch.where(advantages > 0, log_ratio.clamp(max=config.clip_high), log_ratio.clamp(min=-config.clip_low))
    ratio = sequence_mean(cut).exp() * (cut - cut.detach()).exp()
    is_clipped = cut != log_ratio
    return TokenLosses(
        loss=-sequence_mean(advantages) * ratio,
        is_clipped=is_clipped & (advantages > 0),
        is_clipped_lower=is_clipped & (advantages <= 0),
        approx_kl=-log_ratio.detach(),
    )


@register_policy_loss("geo_mean")
@computed_by_token(token_losses, AGGREGATION)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The mean over sequences of rows [B, R], whatever ``loss_agg_mode`` says, as upstream; and its metrics."""
    return aggregated(
        token_losses, old_log_prob, log_prob, advantages, response_mask, AGGREGATION, config, rollout_is_weights
    )
