"""SwiGLU as one kernel.

Limits: float16, bfloat16 or float32; an even last dimension; dense tensors that are not empty (those stay in torch).
Tolerance: 1e-2 (bfloat16), 1e-6 (float32), relative. Backward: torch_npu's own (npu_swiglu_backward).
"""

from __future__ import annotations

from torch import Tensor


def swiglu(x: Tensor) -> Tensor:
    """See ``megatron.core.ops.contract.Swiglu``."""
    import torch_npu

    if x.shape[0] == 0:  # a rank's experts may get no token at all; the kernel does not start on empty tensors
        gate, up = x.chunk(2, dim=-1)
        return gate * up
    activated: Tensor = torch_npu.npu_swiglu(x, dim=-1)
    return activated
