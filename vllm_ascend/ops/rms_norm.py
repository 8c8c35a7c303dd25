"""RMSNorm as one kernel.

Limits: float16, bfloat16 or float32, weight in x's dtype. Tolerance: the weight is applied before the rounding to x's
dtype and not after it as in the reference: 1e-2 (bfloat16), 1e-6 (float32), relative.
"""

from __future__ import annotations

from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """See ``RolloutOps.rms_norm``."""
    import torch_npu

    normed_TH: Tensor = torch_npu.npu_rms_norm(x_TH, weight_H, epsilon=eps)[0]
    return normed_TH
