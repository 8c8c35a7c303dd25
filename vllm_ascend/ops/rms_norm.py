"""RMSNorm as one kernel, alone or together with the sum of the residual stream before it.

Source: npu_rms_norm, npu_add_rms_norm. Limits: float16, bfloat16 or float32, everything in x's dtype. Tolerance: the
weight is applied before the rounding to x's dtype and not after it as in the reference: 1e-2 (bfloat16), 1e-6
(float32), relative.
"""

from __future__ import annotations

from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """See ``RolloutOps.rms_norm``."""
    import torch_npu

    normed_TH: Tensor = torch_npu.npu_rms_norm(x_TH, weight_H, epsilon=eps)[0]
    return normed_TH


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``RolloutOps.add_rms_norm``."""
    import torch_npu

    normed_TH, _, sum_TH = torch_npu.npu_add_rms_norm(x_TH, residual_TH, weight_H, eps)
    return normed_TH, sum_TH
