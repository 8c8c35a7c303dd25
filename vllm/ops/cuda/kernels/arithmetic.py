"""What the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# The interpreter computes with the bits of a bfloat16 or an FP8 as if they were an integer; it cuts off what it should
# round to a bfloat16, and rounds up to an FP8's next power of two wrongly.
IS_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """sums + a b, in float32; no TF32."""
    if IS_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x, float32, in `dtype`, rounded to the nearest even number."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    if IS_INTERPRETED and dtype == tl.float8e4nv:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)  # below, steps of 1/512
    return x.to(dtype)


@triton.jit
def attend(
    scores_QS: tl.tensor,  # times log2(e); -inf where a query does not see a token, but not in a query's first tile
    v_SV: tl.tensor,
    peak_Q: tl.tensor,
    sum_Q: tl.tensor,
    out_QV: tl.tensor,
) -> tl.tensor:
    """The largest scores, the sums of weights and the weighted sums of values, with the tokens of one tile more."""
    new_peak_Q = tl.maximum(peak_Q, tl.max(scores_QS, 1))
    shrink_Q = tl.exp2(peak_Q - new_peak_Q)
    weights_QS = tl.exp2(scores_QS - new_peak_Q[:, None])
    out_QV = dot(rounded(weights_QS, v_SV.dtype), v_SV, out_QV * shrink_Q[:, None])
    return new_peak_Q, sum_Q * shrink_Q + tl.sum(weights_QS, 1), out_QV
