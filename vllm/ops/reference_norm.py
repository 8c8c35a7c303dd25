"""Reference RMS norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    if x_TH.dtype == torch.float32:
        return F.rms_norm(x_TH, weight_H.shape, weight_H, eps)
    x_fp32 = x_TH.float()
    normed = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return weight_H * normed.to(x_TH.dtype)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_TH = x_TH.add_(residual_TH)
    return rms_norm(sum_TH, weight_H, eps), sum_TH
