"""Losses beside the main one: how they enter the gradient, and their values for the log.

Letters: B sequences, T tokens of this rank, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class AuxLossScaler:
    """Puts a loss into the backward pass of the activations that it belongs to (upstream: MoEAuxLossAutoScaler).

    The gradient of the attached loss is ``scale`` at the time of the backward pass. ``set_aux_loss_scale`` sets it for
    a whole model: a schedule to 1 / num_microbatches when losses are means, the caller to 1 over whatever its main loss
    is divided by when ``calculate_per_token_loss``.
    """

    def __init__(self) -> None:
        self.scale: float | torch.Tensor = 1.0

    def attach(self, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """x as it is; whoever differentiates it differentiates ``scale * loss`` (a scalar) too."""
        attached: torch.Tensor = _Attach.apply(x, loss, self)
        return attached


def set_aux_loss_scale(model: nn.Module, scale: float | torch.Tensor) -> None:
    """Set the scale of every module of ``model`` that has an ``aux_loss_scaler``."""
    for module in model.modules():
        scaler = getattr(module, "aux_loss_scaler", None)
        if isinstance(scaler, AuxLossScaler):
            scaler.scale = scale


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scaler: AuxLossScaler) -> torch.Tensor:
        ctx.scaler, ctx.dtype, ctx.device = scaler, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, torch.as_tensor(ctx.scaler.scale, dtype=ctx.dtype, device=ctx.device), None
