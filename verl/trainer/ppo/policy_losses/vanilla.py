"""PPO's clipped loss (arXiv 1707.06347) with a second clip for negative advantages (dual clip, arXiv 1912.09729)."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.policy_losses.registry import SequenceMean, TokenLosses, clamped_log_ratio, loss_of_tokens
from verl.workers.config import ActorConfig


@loss_of_tokens("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: ActorConfig, sequence_mean: SequenceMean
) -> TokenLosses:
    """L = max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0, L = min(L, -A c).

    r = exp(log_prob - old_log_prob), the exponent clamped to +-20; low and high are ``clip_ratio_low`` and
    ``clip_ratio_high`` (DAPO's clip-higher, arXiv 2503.14476, sets them apart), c is ``clip_ratio_c``.
    """
    log_ratio = clamped_log_ratio(old_log_prob, log_prob)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = torch.maximum(unclipped, clipped)
    bound = -advantages * config.clip_ratio_c
    is_bounded = (advantages < 0) & (loss > bound)
    return TokenLosses(
        loss=torch.where(is_bounded, bound, loss),
        is_clipped=clipped > unclipped,
        is_clipped_lower=is_bounded,
        approx_kl=-log_ratio.detach(),
    )
