"""GPG, group policy gradient (arXiv 2504.02546): the plain policy gradient, without ratios and clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.policy_losses.registry import (
    SequenceMean,
    TokenLosses,
    aggregated,
    computed_by_token,
    register_policy_loss,
)
from verl.workers.config import ActorConfig


def token_losses(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: ActorConfig, sequence_mean: SequenceMean
) -> TokenLosses:
    """L = -A log_prob; the old log-probs only show how far the policy has moved."""
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return TokenLosses(-advantages * log_prob, never, never, approx_kl=(old_log_prob - log_prob).detach())


@register_policy_loss("gpg")
@computed_by_token(token_losses)
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The aggregated loss of rows [B, R], and how far the policy has moved; ``config`` is not read."""
    return aggregated(
        token_losses, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
