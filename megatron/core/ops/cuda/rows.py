"""Norms, SwiGLU and rotary positions: one pass over memory each, forward and backward.

The kernels take float32, bfloat16 and float16, all tensors of one dtype, and compute in float32; other dtypes go
through the reference. Tolerance: the contract's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.ops import reference
from megatron.core.ops.cuda.kernels import rows as kernels
from megatron.core.ops.cuda.launch import block_of, cdiv, has_dtype, num_warps

MAX_PROGRAMS = 512  # of the norm's gradient, each with a row of float32 sums for the weight
_PART = 1024  # columns of a SwiGLU program
_HEADS_SIZE = 2048  # elements of a rotary program


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``contract.RmsNorm``; backward keeps x and the inverse of each row's root mean square."""
    if not has_dtype(x, weight):
        return reference.rms_norm(x, weight, eps)
    out: Tensor = _RmsNorm.apply(x, weight.contiguous(), eps)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _rows(x)
        out, inverse = x.new_empty(x.shape), x.new_empty(len(rows), dtype=torch.float32)
        if rows.numel():
            width = rows.shape[1]
            kernels.rms_norm[(len(rows),)](
                rows,
                weight,
                out,
                inverse,
                rows.stride(0),
                width,
                eps,
                BLOCK=block_of(width),
                num_warps=num_warps(width),
            )
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        rows, grad_x = _rows(x), x.new_empty(x.shape)
        if not rows.numel():
            return grad_x, torch.zeros_like(weight), None
        num_rows, width = rows.shape
        rows_each = block_of(cdiv(num_rows, MAX_PROGRAMS))
        parts = x.new_empty(cdiv(num_rows, rows_each), width, dtype=torch.float32)
        kernels.rms_norm_grad[(len(parts),)](
            grad.contiguous(),
            rows,
            weight,
            inverse,
            grad_x,
            parts,
            rows.stride(0),
            num_rows,
            width,
            ROWS=rows_each,
            BLOCK=block_of(width),
            num_warps=num_warps(width),
        )
        return grad_x, parts.sum(0).to(weight.dtype), None


def swiglu(x: Tensor) -> Tensor:
    """See ``contract.Swiglu``; backward keeps x alone."""
    if not has_dtype(x):
        return reference.swiglu(x)
    out: Tensor = _Swiglu.apply(x.contiguous())
    return out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        if out.numel():
            kernels.swiglu[_parts(out)](x, out, out.shape[-1], BLOCK=block_of(out.shape[-1], _PART))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        if grad.numel():
            width = grad.shape[-1]
            kernels.swiglu_grad[_parts(grad)](grad.contiguous(), x, grad_x, width, BLOCK=block_of(width, _PART))
        return grad_x


def rotary_interleaved(x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``contract.RotaryInterleaved``; keeps the order of R."""
    if not has_dtype(x_TNR) or cos.dtype != torch.float32 or cos.requires_grad or sin.requires_grad:
        return reference.rotary_interleaved(x_TNR, cos, sin)
    out: Tensor = _Rotary.apply(x_TNR, cos.contiguous(), sin.contiguous())
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_TNR, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(x_TNR: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x_TNR = x_TNR if x_TNR.stride(-1) == 1 else x_TNR.contiguous()
    out = x_TNR.new_empty(x_TNR.shape)
    if out.numel():
        num_tokens, num_heads, size = x_TNR.shape
        pairs = block_of(size // 2)
        heads = block_of(num_heads, max(1, _HEADS_SIZE // (2 * pairs)))
        strides = x_TNR.stride()[:2]
        kernels.rotary[(num_tokens, cdiv(num_heads, heads))](
            x_TNR, cos, sin, out, *strides, num_heads, size, sign, HEADS=heads, PAIRS=pairs
        )
    return out


def _rows(x: Tensor) -> Tensor:
    """x [..., D] as [rows, D] with neighbouring columns."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _parts(x: Tensor) -> tuple[int, int]:
    """The grid of a kernel of which each program takes a part of a row of x [..., D]."""
    return x.numel() // x.shape[-1], cdiv(x.shape[-1], block_of(x.shape[-1], _PART))
