"""GPG, group policy gradient (arXiv 2504.02546): the plain policy gradient, without ratios and clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.policy_losses.registry import SequenceMean, TokenLosses, loss_of_tokens
from verl.workers.config import ActorConfig


@loss_of_tokens("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: ActorConfig, sequence_mean: SequenceMean
) -> TokenLosses:
    """L = -A log_prob; the old log-probs only show how far the policy has moved."""
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return TokenLosses(-advantages * log_prob, never, never, approx_kl=(old_log_prob - log_prob).detach())
