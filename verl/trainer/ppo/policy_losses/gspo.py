"""GSPO, group sequence policy optimization (arXiv 2507.18071): clipping by the ratio of whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.policy_losses.registry import SequenceMean, TokenLosses, loss_of_tokens
from verl.workers.config import ActorConfig

LARGEST_LOG_RATIO = 10.0  # of a sequence's mean: far beyond any clip range, and its exponential is finite


@loss_of_tokens("gspo", default_agg_mode="seq-mean-token-mean")
def compute_policy_loss_gspo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: ActorConfig, sequence_mean: SequenceMean
) -> TokenLosses:
    """L_t = max(-A_t s_t, -A_t clip(s_t, 1 - low, 1 + high)), s_t = sg[s] exp(log_prob_t - sg[log_prob_t]).

    s = exp(mean over the sequence of log_prob - old_log_prob) is the ratio of the sequence (equation 7), sg stops the
    gradient (equation 14). With one advantage a sequence, the mean of L_t over its tokens has value and gradient of the
    paper's loss (equation 5), so that the gradient needs no sums over ranks; advantages may also differ by token. The
    paper's objective is that mean, then the mean over sequences: ``loss_agg_mode=seq-mean-token-mean``. Its clip ranges
    are 3e-4 and 4e-4. There is no dual clip.
    """
    log_ratio = log_prob - old_log_prob
    mean = torch.clamp(sequence_mean(log_ratio), min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)
    ratio = mean.exp() * (log_prob - log_prob.detach()).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    is_clipped = clipped > unclipped
    return TokenLosses(
        loss=torch.maximum(unclipped, clipped),
        is_clipped=is_clipped,
        is_clipped_lower=torch.zeros_like(is_clipped),
        approx_kl=-log_ratio.detach(),
    )
