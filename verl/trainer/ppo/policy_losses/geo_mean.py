"""GMPO, geometric-mean policy optimization (arXiv 2507.20673): tokens are clipped, the ratio is the sequence's."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.policy_losses.registry import SequenceMean, TokenLosses, clamped_log_ratio, loss_of_tokens
from verl.workers.config import ActorConfig


@loss_of_tokens("geo_mean", own_agg_mode="seq-mean-token-mean")
def compute_policy_loss_geo_mean(
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
