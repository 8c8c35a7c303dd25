"""torch's products of FP8 blocks by cuBLAS (``torch._scaled_mm``) in plain torch, as an H200 was seen to take them."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_formats.fp8 import BLOCK


def scaled_mm(
    calls: list[Tensor], a_MK: Tensor, b_KN: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """calls gets a. scale_a [M, C] for 128 channels of a row; scale_b [C, N], or [C, N / 128] of whole blocks."""
    calls.append(a_MK)
    (rows, inputs), outputs = a_MK.shape, b_KN.shape[1]
    assert rows % 4 == 0 and inputs % (4 * BLOCK) == 0 and outputs % 16 == 0, (a_MK.shape, b_KN.shape)
    assert a_MK.stride(1) == b_KN.stride(0) == scale_a.stride(0) == 1
    if scale_b.shape[1] != outputs:
        scale_b = scale_b.repeat_interleave(BLOCK, 1)[:, :outputs]
    a_MCk, b_NCk = (x.float().unflatten(1, (-1, BLOCK)) for x in (a_MK, b_KN.t()))
    a_MK, b_NK = ((x * s[..., None]).flatten(1) for x, s in ((a_MCk, scale_a), (b_NCk, scale_b.t())))
    return (a_MK @ b_NK.T).to(out_dtype)
