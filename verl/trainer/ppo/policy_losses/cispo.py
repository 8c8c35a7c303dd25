"""CISPO, clipped importance-sampling weights (MiniMax-M1, arXiv 2506.13585): no token loses its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.policy_losses.registry import SequenceMean, TokenLosses, clamped_log_ratio, loss_of_tokens
from verl.workers.config import ActorConfig


@loss_of_tokens("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: ActorConfig, sequence_mean: SequenceMean
) -> TokenLosses:
    """L = -sg[clip(r, 1 - low, 1 + high)] A log_prob (equations 4 and 5), r = exp(log_prob - old_log_prob).

    The paper has no lower bound: that is ``clip_ratio_low=1``, since no ratio is below 0. It aggregates by
    ``loss_agg_mode=token-mean``.
    """
    log_ratio = clamped_log_ratio(old_log_prob, log_prob).detach()
    ratio = log_ratio.exp()
    weight = torch.clamp(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    is_clipped = weight != ratio
    return TokenLosses(
        loss=-weight * advantages * log_prob,
        is_clipped=is_clipped,
        is_clipped_lower=torch.zeros_like(is_clipped),
        approx_kl=-log_ratio,
    )
