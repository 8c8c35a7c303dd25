"""AdamW on a CPU: gradient, moments and weight are read and written once, in the dtypes in which they are stored."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.ops.contract import AdamwSettings
from megatron.core.ops.cpu.build import has_dtype, run
from megatron.core.ops.fused_adamw import adamw_step as torch_adamw_step


def adamw_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, how: AdamwSettings, weight: Tensor | None = None
) -> None:
    """See ``contract.AdamwStep``."""
    stored = [grad, exp_avg, exp_avg_sq] + ([] if weight is None else [weight])
    if not all(has_dtype(tensor) for tensor in stored):
        torch_adamw_step(param, grad, exp_avg, exp_avg_sq, how, weight)
        return
    assert all(tensor.is_contiguous() for tensor in (param, *stored)), "the state of an optimizer is flat"
    halves = sum((tensor.dtype == torch.bfloat16) << place for place, tensor in enumerate(stored))
    (beta1, beta2), step = how.betas, how.step
    scales = how.lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step), how.eps, 1 - how.lr * how.weight_decay
    numbers = param.numel(), halves, how.grad_scale, 1 - beta1, beta2, 1 - beta2, *scales
    run("adamw", param.dtype, param, grad, exp_avg, exp_avg_sq, weight, *numbers)
