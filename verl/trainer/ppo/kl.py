"""KL estimates of tokens and the controllers of their coefficient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.utils.errors import BatchError, UnknownNameError


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), ``kl_penalty_forward``; with a ``+``, with the gradient of k2.

    In a loss, k2 = d^2 / 2 is the estimate whose gradient is that of the KL: ``k3+`` shows the value of k3, which is
    without bias, and learns from k2. ``mse+`` is ``mse``.
    """
    kind = kl_penalty.removesuffix("+")
    forward = kl_penalty_forward(logprob, ref_logprob, kind)
    if kind == kl_penalty or kind in ("mse", "k2"):
        return forward
    backward = kl_penalty_forward(logprob, ref_logprob, "k2")
    return backward - backward.detach() + forward.detach()


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate of a kind (J. Schulman, "Approximating KL divergence"), with its own gradient.

    ``kl``/``k1``: log p - log q. ``abs``: its absolute value. ``mse``/``k2``: half its square. ``low_var_kl``/``k3``:
    exp(d) - d - 1 with d = log q - log p clamped to +-20, the result clamped to +-10.
    """
    difference = logprob - ref_logprob
    values = _estimate(difference, kl_penalty)
    if values.requires_grad:
        # There is no mask here. What the caller's mask leaves out comes back with the gradient 0, and behind a NaN or
        # infinite difference 0 would become 0 * NaN.
        unused: list[Tensor] = []
        values.register_hook(lambda grad: unused.append(grad == 0))
        difference.register_hook(lambda grad: grad.masked_fill(unused.pop(), 0.0))
    return values


def _estimate(difference: Tensor, kl_penalty: str) -> Tensor:
    if kl_penalty in ("kl", "k1"):
        return difference
    if kl_penalty == "abs":
        return difference.abs()
    if kl_penalty in ("mse", "k2"):
        return 0.5 * difference.square()
    if kl_penalty in ("low_var_kl", "k3"):
        reverse = torch.clamp(-difference, min=-20.0, max=20.0)
        return torch.clamp(reverse.exp() - reverse - 1.0, min=-10.0, max=10.0)
    raise UnknownNameError(
        f"kl_penalty {kl_penalty!r} is not known; expected kl (k1), abs, mse (k2) or low_var_kl (k3), which need the "
        "log-prob of the sampled token alone"
    )


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


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """The controller of a section ``algorithm.kl_ctrl`` (or of any object with its keys)."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type != "adaptive":
        raise UnknownNameError(f"algorithm.kl_ctrl.type is {kl_ctrl.type!r}; expected fixed or adaptive")
    if kl_ctrl.horizon <= 0:
        raise BatchError(f"algorithm.kl_ctrl.horizon is {kl_ctrl.horizon}; expected above 0")
    return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
