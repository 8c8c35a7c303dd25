"""Masks that select: what lies outside a mask, NaN and infinities included, reaches no value and no gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def selected(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask`` is not 0, and 0 elsewhere.

    A product with the mask would keep a NaN, because 0 * NaN is NaN, and so would its gradient. Inputs are selected,
    not results: behind a function with an infinite slope the gradient 0 of a result becomes NaN again.
    """
    return torch.where(mask == 0, 0.0, values)


def finite_outside(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` with 0 in place of NaN and infinities outside ``mask``: for sums in which finite ones there count."""
    return torch.where((mask == 0) & ~values.isfinite(), 0.0, values)


def response_lengths(mask: Tensor) -> Tensor:
    """The tokens [B] of each response, int64: up to the last one that ``mask`` [B, R] has, which the model wrote."""
    return (mask.bool() * torch.arange(1, mask.shape[-1] + 1, device=mask.device)).amax(-1)


def row_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """The sum [B] of each row of ``rewards`` [B, R].

    A finite reward outside ``mask`` counts: that of an empty response lies there, and so does that of a response whose
    last token a correction rejected. A NaN or an infinity there does not.
    """
    return finite_outside(rewards, mask).sum(-1)
