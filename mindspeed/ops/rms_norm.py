"""RMSNorm as one kernel.

Limits: float16, bfloat16 or float32, weight in x's dtype. Tolerance: the weight is applied before the rounding to x's
dtype and not after it as in the reference, so one unit in the last place: 1e-2 (bfloat16), 1e-6 (float32), relative.
Backward: torch_npu's own (npu_rms_norm_backward).
"""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``megatron.core.ops.contract.RmsNorm``."""
    import torch_npu

    normed: Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    return normed
