"""DeepSeek's interleaved rotary embedding as one kernel.

Limits: rotary size R even and at most 896. Computed in float32 whatever x is, as the contract says: the kernel takes
x, cos and sin in one dtype, and angles in bfloat16 would cost two digits. Tolerance: 1e-6 (float32), 1e-2 (bfloat16),
relative. Backward: torch_npu's own (npu_rotary_mul_backward); cos and sin carry no gradient.
"""

from __future__ import annotations

from torch import Tensor


def rotary_interleaved(x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``megatron.core.ops.contract.RotaryInterleaved``; keeps the order of R."""
    import torch_npu

    rotated: Tensor = torch_npu.npu_rotary_mul(
        x_TNR.float().unsqueeze(0), _per_channel(cos), _per_channel(sin), rotary_mode="interleave"
    )
    return rotated.squeeze(0).to(x_TNR.dtype)


def _per_channel(angles_Tr: Tensor) -> Tensor:
    """[T, R/2] -> [1, T, 1, R]: both members of a pair turn by the same angle."""
    return angles_Tr.float().repeat_interleave(2, dim=-1)[None, :, None, :]
