"""AdamW through torch's fused entry point, which each device serves with a kernel of its own.

On Ascend torch_npu serves it with aclnnApplyAdamWV2, 2.5.1.post1 too (its library registers _fused_adamw_ for the
device); why neither the older npu_apply_adam_w (it wants the powers of the betas) nor apex: see mindspeed/README.md.
Limits there: float32, contiguous. Tolerance: 1e-6 relative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops.contract import AdamwSettings
from megatron.core.ops.reference import in_float32


def adamw_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, how: AdamwSettings, weight: Tensor | None = None
) -> None:
    """See ``contract.AdamwStep``: in float32 each value is read and written once, without temporaries."""
    with in_float32(grad, exp_avg, exp_avg_sq, scale=how.grad_scale) as (wide_grad, mean, square):
        torch._fused_adamw_(
            [param],
            [wide_grad],
            [mean],
            [square],
            [],
            [torch.full((1,), float(how.step), device=param.device)],
            lr=how.lr,
            beta1=how.betas[0],
            beta2=how.betas[1],
            weight_decay=how.weight_decay,
            eps=how.eps,
            amsgrad=False,
            maximize=False,
        )
    if weight is not None:
        weight.copy_(param)
