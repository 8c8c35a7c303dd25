"""Aggregation of losses, KL estimates and KL controllers.

Advantages are one file each in ``algos``, policy losses in ``policy_losses``; both registries are reached from here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.trainer.config.algorithm import KLControlConfig
from verl.trainer.ppo.algos import AdvantageEstimator, get_adv_estimator_fn, register_adv_est
from verl.trainer.ppo.policy_losses import get_policy_loss_fn, register_policy_loss

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
    "token_loss_weights",
]


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) (J. Schulman, "Approximating KL divergence").

    ``kl``/``k1``: log p - log q. ``abs``: its absolute value. ``mse``/``k2``: half its square. ``low_var_kl``/``k3``:
    exp(d) - d - 1 with d = log q - log p clamped to +-20, the result clamped to +-10.
    """
    difference = logprob - ref_logprob
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    if kind in ("low_var_kl", "k3"):
        reverse = torch.clamp(-difference, min=-20.0, max=20.0)
        return torch.clamp(reverse.exp() - reverse - 1.0, min=-10.0, max=10.0)
    raise ValueError(f"kl_penalty {kind!r} is not known; expected kl, abs, mse or low_var_kl")


def token_loss_weights(response_mask: Tensor, loss_agg_mode: str, *, num_tokens: float, num_sequences: float) -> Tensor:
    """Weights w [B, R] for which sum(w * loss) over every rank's rows is the aggregated loss of the mini-batch.

    Args:
        response_mask: fp32 [B, R], this rank's rows.
        loss_agg_mode: ``token-mean``, ``seq-mean-token-sum``, ``seq-mean-token-mean`` or ``seq-mean-token-sum-norm``
            (Dr. GRPO: token sums over the constant R, then the mean over sequences is left out as upstream does).
        num_tokens, num_sequences: response tokens and non-empty responses of the whole mini-batch over all ranks.
    """
    if loss_agg_mode == "token-mean":
        return response_mask / max(num_tokens, 1.0)
    if loss_agg_mode == "seq-mean-token-sum":
        return response_mask / max(num_sequences, 1.0)
    if loss_agg_mode == "seq-mean-token-mean":
        lengths = response_mask.sum(-1, keepdim=True).clamp(min=1.0)
        return response_mask / lengths / max(num_sequences, 1.0)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        return response_mask / response_mask.shape[-1]
    raise ValueError(f"loss_agg_mode {loss_agg_mode!r} is not known")


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str) -> Tensor:
    """A [B, R] loss to a scalar over the tokens of ``loss_mask``; see ``token_loss_weights`` for the modes."""
    mask = loss_mask.to(loss_mat.dtype)
    weights = token_loss_weights(
        mask, loss_agg_mode, num_tokens=float(mask.sum()), num_sequences=float((mask.sum(-1) > 0).sum())
    )
    return (weights * loss_mat).sum()


class FixedKLController:
    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do."""


class AdaptiveKLController:
    """Steers the KL towards a target by scaling its coefficient (arXiv 1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """value *= 1 + clip(current/target - 1, -0.2, 0.2) * n_steps / horizon."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: KLControlConfig) -> FixedKLController | AdaptiveKLController:
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
