"""Rotary embeddings, after "torch_npu.npu_rotary_mul", "aclnnRotaryPositionEmbeddingGrad" and
"torch_npu.npu_interleave_rope" of the Ascend documentation.

``y = x r1 + turn(x) r2`` with r1 = cos and r2 = sin broadcast to x. turn: "half" (-second half, first half),
"interleave" (-x[1], x[0], -x[3], x[2], ...).
"""

from __future__ import annotations

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import require, require_floats

MAX_HEAD_SIZE = 896
INTERLEAVE_ROPE_SIZE = 64


@reference("npu_rotary_mul")
def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """x 4-D, r1 and r2 4-D with the same last size and 1 where they are broadcast -> y like x."""
    _check("npu_rotary_mul", input, r1, r2, rotary_mode)
    require(rotate is None, "npu_rotary_mul", "a rotation matrix is not simulated")
    x = input.double()
    return (x * r1.double() + _turn(x, rotary_mode) * r2.double()).to(input.dtype)


@reference("npu_rotary_mul_backward")
def rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, r1 and r2; the last two summed over what was broadcast."""
    _check("npu_rotary_mul_backward", input, r1, r2, rotary_mode)
    dy, x = grad.double(), input.double()
    # The turn is a rotation by 90 degrees, so its transpose is its negative.
    grad_x = dy * r1.double() - _turn(dy * r2.double(), rotary_mode)
    grad_r1, grad_r2 = (dy * x).sum_to_size(r1.shape), (dy * _turn(x, rotary_mode)).sum_to_size(r2.shape)
    return grad_x.to(input.dtype), grad_r1.to(r1.dtype), grad_r2.to(r2.dtype)


@reference("npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, N, S, 64], cos and sin [B or 1, 1 or N, S or 1, 64] -> even members, then odd members, turned by halves."""
    op = "npu_interleave_rope"
    require(x.dtype in (torch.float16, torch.bfloat16) and cos.dtype == sin.dtype == x.dtype, op, "float16 or bfloat16")
    require(x.dim() == cos.dim() == sin.dim() == 4 and x.shape[-1] == INTERLEAVE_ROPE_SIZE, op, "wants [B, N, S, 64]")
    require(x.numel() > 0, op, "wants a tensor that is not empty")
    require(all(tensor.is_contiguous() for tensor in (x, cos, sin)), op, "wants dense tensors")
    apart = torch.cat((x[..., 0::2], x[..., 1::2]), -1).double()
    return (apart * cos.double() + _turn(apart, "half") * sin.double()).to(x.dtype)


def _turn(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.tensor_split(2, -1)
        return torch.cat((-second, first), -1)
    turned = torch.empty_like(x)
    turned[..., 0::2], turned[..., 1::2] = -x[..., 1::2], x[..., 0::2]
    return turned


def _check(op: str, x: Tensor, r1: Tensor, r2: Tensor, mode: str) -> None:
    require(mode in ("half", "interleave"), op, f"no rotary_mode {mode!r}")
    require_floats(op, x, r1, r2)
    require(x.numel() > 0, op, "wants a tensor that is not empty")
    size = x.shape[-1]
    require(x.dim() == r1.dim() == r2.dim() == 4 and r1.shape == r2.shape, op, "wants three 4-D tensors")
    require(size == r1.shape[-1] and size % 2 == 0 and size <= MAX_HEAD_SIZE, op, f"head size {size}")
