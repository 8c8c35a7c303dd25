"""PPO's clipped loss (arXiv 1707.06347) with a second clip for negative advantages (dual clip, arXiv 1912.09729)."""

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


def token_losses(
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


@register_policy_loss("vanilla")
@computed_by_token(token_losses)
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The aggregated dual-clip loss of rows [B, R], and its metrics; ``config`` has the clip ratios."""
    return aggregated(
        token_losses, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
