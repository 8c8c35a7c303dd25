"""SwiGLU as one kernel.

Limits: float16, bfloat16 or float32. Tolerance: 1e-2 (bfloat16), 1e-6 (float32), relative.
"""

from __future__ import annotations

from torch import Tensor


def silu_and_mul(x_T2F: Tensor) -> Tensor:
    """See ``RolloutOps.silu_and_mul``."""
    import torch_npu

    activated_TF: Tensor = torch_npu.npu_swiglu(x_T2F, dim=-1)
    return activated_TF
