"""AdamW on a CPU: gradient, moments and weight are read and written once, in the dtypes in which they are stored."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.ops.cpu.build import has_dtype, run
from megatron.core.ops.fused_adamw import adamw_step as torch_adamw_step


def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None = None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> None:
    """See ``contract.AdamwStep``."""
    stored = [grad, exp_avg, exp_avg_sq] + ([] if weight is None else [weight])
    if not all(has_dtype(tensor) for tensor in stored):
        torch_adamw_step(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            weight,
            step=step,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
        )
        return
    assert all(tensor.is_contiguous() for tensor in (param, *stored)), "the state of an optimizer is flat"
    halves = sum((tensor.dtype == torch.bfloat16) << place for place, tensor in enumerate(stored))
    run(
        "adamw",
        param.dtype,
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        weight,
        param.numel(),
        halves,
        grad_scale,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        lr / (1 - betas[0] ** step),
        1 / math.sqrt(1 - betas[1] ** step),
        eps,
        1 - lr * weight_decay,
    )
