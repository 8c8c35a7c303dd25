"""DeepSeek's interleaved rotary embedding, first members before second members, as one kernel where there is one.

Limits: R = 64 in float16 or bfloat16 runs npu_interleave_rope, whose order is the contract's and which wants dense
tensors; any other even R up to 896, and float32, runs npu_rotary_mul and a reordering. cos and sin are cast to x's
dtype. Tolerance: 1e-2 (bfloat16), 1e-6 (float32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import Angles

ONE_KERNEL_SIZE = 64


def rotary_interleaved(x_TNR: Tensor, angles: Angles) -> Tensor:
    """See ``RolloutOps.rotary_interleaved``."""
    import torch_npu

    cos_TR, sin_TR = (part_TR.to(x_TNR.dtype) for part_TR in angles)
    if x_TNR.shape[-1] == ONE_KERNEL_SIZE and x_TNR.dtype != torch.float32:
        # Layout BNSD with one token in each sequence.
        rotated: Tensor = torch_npu.npu_interleave_rope(
            x_TNR.unsqueeze(2).contiguous(), cos_TR[:, None, None, :], sin_TR[:, None, None, :]
        )
        return rotated.squeeze(2)
    in_place: Tensor = torch_npu.npu_rotary_mul(
        x_TNR.unsqueeze(0), _per_channel(cos_TR), _per_channel(sin_TR), rotary_mode="interleave"
    ).squeeze(0)
    return torch.cat((in_place[..., 0::2], in_place[..., 1::2]), dim=-1)


def _per_channel(angles_TR: Tensor) -> Tensor:
    """[T, R] whose halves are equal -> [1, T, 1, R] with each angle beside itself, for the pairs."""
    half = angles_TR.shape[-1] // 2
    once_TR = angles_TR[:, :half]
    return torch.stack((once_TR, once_TR), dim=-1).flatten(1)[None, :, None, :]
