"""Sums over a token's logits and the gradient of its cross entropy; no float32 copy of the logits is made."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_sum_exp(
    logits: tl.tensor,
    lse: tl.tensor,
    mean: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token; sums are kept relative to the largest logit so far. A logit of -inf counts nothing in the mean."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(values, 0))
        base = tl.where(tl.abs(new_largest) == float("inf"), 0.0, new_largest)  # inf - inf is no number
        weights = tl.exp(values - base)
        kept = tl.exp(largest - base)
        total = total * kept + tl.sum(weights, 0)
        if WITH_MEAN:
            weighted = weighted * kept + tl.sum(tl.where(weights == 0.0, 0.0, weights * values), 0)
        largest = new_largest
    tl.store(lse + row, tl.log(total) + tl.where(tl.abs(largest) == float("inf"), 0.0, largest))
    if WITH_MEAN:
        tl.store(mean + row, weighted / total)


@triton.jit
def cross_entropy_grad(
    logits: tl.tensor,
    lse: tl.tensor,
    target: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A part of one token's row: ``(exp(l_v - lse) - [v = target]) grad``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < vocab
    values = tl.load(logits + row * stride + columns, mask=is_in, other=0.0).to(tl.float32)
    probs = tl.exp(values - tl.load(lse + row))
    result = (probs - tl.where(columns == tl.load(target + row), 1.0, 0.0)) * tl.load(grad + row)
    tl.store(out + row * vocab + columns, result.to(out.dtype.element_ty), mask=is_in)
