"""Top-k and top-p of logits, after "torch_npu.npu_top_k_top_p" of the Ascend documentation.

Simplified: the probabilities are summed in float32, in ascending order, as the formulas say; the kernel's rounding is
not known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import FLOATS, require

MAX_K = 1024


@reference("npu_top_k_top_p")
def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """logits [B, W], p [B] in their dtype, k [B] int32 -> logits, -inf where they are left out."""
    op = "npu_top_k_top_p"
    require(p is not None and k is not None, op, "torch_npu 2.5.1 wants p and k")
    assert p is not None and k is not None
    require(logits.dtype in FLOATS and logits.dim() == 2, op, f"logits of {tuple(logits.shape)}, {logits.dtype}")
    require(p.dtype == logits.dtype and p.shape == logits.shape[:1], op, f"p of {tuple(p.shape)}, {p.dtype}")
    require(k.dtype == torch.int32 and k.shape == logits.shape[:1], op, f"k of {tuple(k.shape)}, {k.dtype}")
    require(bool((k >= 1).all()) and int(k.max()) <= min(MAX_K, logits.shape[1]), op, "k outside of [1, 1024]")
    require(bool(((p >= 0) & (p <= 1)).all()), op, "p outside of [0, 1]")
    ascending, order = logits.float().sort(dim=-1, stable=True)
    kth = ascending.gather(1, (logits.shape[1] - k.long()).unsqueeze(1))
    ascending = ascending.masked_fill(ascending < kth, float("-inf"))
    is_left_out = ascending.softmax(-1).cumsum(-1) <= (1 - p.float()).unsqueeze(1)
    is_left_out[:, -1] = False
    ascending = ascending.masked_fill(is_left_out, float("-inf"))
    return torch.empty_like(ascending).scatter_(1, order, ascending).to(logits.dtype)
