"""AdamW on the host: torch's fused CPU kernel, which reads and writes each value once, on all of torch's threads."""

from __future__ import annotations

import torch


def fused_adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """See ``megatron.core.ops.contract.AdamwStep``; moments equal the reference's bits, weights to 1e-6 relative."""
    torch._fused_adamw_(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(step))],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
