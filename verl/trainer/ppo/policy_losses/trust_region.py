"""Losses that bound the update in another way than by clipping the ratio: SAPO and DPPO."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.ppo.policy_losses.registry import SequenceMean, TokenLosses, clamped_log_ratio, loss_of_tokens
from verl.workers.config import ActorConfig


@loss_of_tokens("sapo", default_agg_mode="seq-mean-token-mean")
def compute_policy_loss_sapo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: ActorConfig, sequence_mean: SequenceMean
) -> TokenLosses:
    """L = -f(r) A, f(r) = sigmoid(tau (r - 1)) 4 / tau, tau = ``tau_pos`` where A > 0, else ``tau_neg``.

    This is soft adaptive policy optimization (SAPO, arXiv 2511.20347). f has the slope 1 at r = 1, so that the gradient
    on-policy is the policy gradient. The paper's objective is the mean over the tokens, then over the sequences:
    ``loss_agg_mode=seq-mean-token-mean``.
    """
    log_ratio = clamped_log_ratio(old_log_prob, log_prob)
    tau = torch.where(advantages > 0, config.policy_loss.tau_pos, config.policy_loss.tau_neg)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return TokenLosses(-gate * advantages, never, never, approx_kl=-log_ratio.detach())


@loss_of_tokens("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: ActorConfig, sequence_mean: SequenceMean
) -> TokenLosses:
    """L = -M A r; M = 0 where the update would move a token's probability p further away from the old one q, else 1.

    This is divergence proximal policy optimization (DPPO, arXiv 2602.04879, equations 11 to 13) with the binary total
    variation abs(p - q): M = 0 where A > 0 and p - q > ``clip_ratio_high``, and where A < 0 and q - p >
    ``clip_ratio_low``. The paper has one threshold, and takes q from the rollout, as ``bypass_mode`` does here.
    """
    log_ratio = clamped_log_ratio(old_log_prob, log_prob)
    moved = (log_prob.exp() - old_log_prob.exp()).detach()
    is_masked = ((advantages > 0) & (moved > config.clip_high)) | ((advantages < 0) & (-moved > config.clip_low))
    loss = torch.where(is_masked, 0.0, -advantages * log_ratio.exp())
    return TokenLosses(loss, is_masked, torch.zeros_like(is_masked), approx_kl=-log_ratio.detach())
