"""Parameters that are held in FP8 blocks, and the form in which products take them.

Activations stay in the model's dtype: a product takes the weight's blocks multiplied out, rounded once to that dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_formats.fp8 import BLOCK
from vllm.ops.weights import PackedWeight


@dataclass(frozen=True)
class BlockScales:
    """What turns an e4m3 parameter [..., R, C] back: element (r, c) times scale_inv[..., row_blocks[r], its column's].

    The blocks are those of the whole Hugging Face tensors, wherever this rank's slices of them begin.
    """

    scale_inv: Tensor  # fp32 [..., SR, SC]
    row_blocks_R: Tensor  # int64
    column_blocks_C: Tensor | None  # int64; None: whole blocks from the first column on
    dtype: torch.dtype  # of products


def dense(weight: Tensor | PackedWeight) -> Any:
    """Return a weight as products take it: itself, or dequantised, in its memory order, when it is held in FP8."""
    scales: BlockScales | None = getattr(weight, "block_scales", None)
    if scales is None:
        return weight
    assert isinstance(weight, Tensor)
    out = weight.to(scales.dtype)  # exact
    rows = scales.scale_inv.index_select(-2, scales.row_blocks_R)
    if scales.column_blocks_C is None:
        out.unflatten(-1, (-1, BLOCK)).mul_(rows.unsqueeze(-1))
    else:
        out.mul_(rows.index_select(-1, scales.column_blocks_C))
    return out
