"""Norms, SwiGLU, rotary positions and the order of tokens by expert: one pass over memory each, forward and backward.

The kernels take float32 and bfloat16 and compute in float32; other dtypes go through the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.ops import reference, reference_moe
from megatron.core.ops.cpu.build import has_dtype, run


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``contract.RmsNorm``; backward keeps x and the inverse of each row's root mean square."""
    if not _are_taken(x, weight):
        return reference.rms_norm(x, weight, eps)
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _rows(x)
        out, inverse = x.new_empty(x.shape), x.new_empty(len(rows), dtype=torch.float32)
        run("rms_norm", x.dtype, rows, weight, out, inverse, *rows.shape, rows.stride(0), eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        rows, grad_x = _rows(x), x.new_empty(x.shape)
        parts = weight.new_zeros(torch.get_num_threads(), 2, len(weight), dtype=torch.float32)
        shape = *rows.shape, rows.stride(0)
        run("rms_norm_grad", x.dtype, grad.contiguous(), rows, weight, inverse, grad_x, parts, *shape)
        return grad_x, parts[:, 0].sum(0).to(weight.dtype), None


def swiglu(x: Tensor) -> Tensor:
    """See ``contract.Swiglu``; backward keeps x alone."""
    if not _are_taken(x):
        return reference.swiglu(x)
    out: Tensor = _Swiglu.apply(x.contiguous())
    return out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        run("swiglu", x.dtype, x, out, *_rows(out).shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        run("swiglu_grad", x.dtype, grad.contiguous(), x, grad_x, *_rows(grad).shape)
        return grad_x


def rotary_interleaved(x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``contract.RotaryInterleaved``."""
    if not _are_taken(x_TNR) or cos.dtype != torch.float32 or cos.requires_grad or sin.requires_grad:
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
    run("rotary", x_TNR.dtype, x_TNR, cos, sin, out, *x_TNR.shape, *x_TNR.stride()[:2], sign)
    return out


def token_permute(tokens_TH: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
    """See ``contract.TokenPermute``; ``row_map`` is the reference's."""
    if not _are_taken(tokens_TH):
        return reference_moe.token_permute(tokens_TH, indices_TK)
    order, row_map = reference_moe.expert_order(indices_TK)
    rows: Tensor = _Permute.apply(tokens_TH, order, row_map, indices_TK.shape[1])
    return rows, row_map


def token_unpermute(rows: Tensor, row_map: Tensor, probs_TK: Tensor | None = None, topk: int = 1) -> Tensor:
    """See ``contract.TokenUnpermute``."""
    if probs_TK is None or not _are_taken(rows) or probs_TK.dtype != torch.float32:
        return reference_moe.token_unpermute(rows, row_map, probs_TK, topk)
    out: Tensor = _WeightedUnpermute.apply(rows.contiguous(), row_map, probs_TK.contiguous())
    return out


class _Permute(reference_moe.PermuteFunction):
    """Rows by expert; the gradient adds each token's K rows as it reads them."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row_map,) = ctx.saved_tensors
        return _added_rows(grad.contiguous(), row_map, None, ctx.topk), None, None, None


class _WeightedUnpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_map: Tensor, probs_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows, row_map, probs_TK)
        return _added_rows(rows, row_map, probs_TK, probs_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        rows, row_map, probs_TK = ctx.saved_tensors
        grad_rows, grad_probs = torch.empty_like(rows), torch.empty_like(probs_TK)
        sizes = *probs_TK.shape, rows.shape[1]
        grads = grad_rows, grad_probs
        run("weighted_rows_grad", rows.dtype, grad_TH.contiguous(), rows, row_map, probs_TK, *grads, *sizes)
        return grad_rows, None, grad_probs


def _added_rows(rows: Tensor, row_map: Tensor, probs_TK: Tensor | None, topk: int) -> Tensor:
    num_tokens, size = row_map.numel() // topk, rows.shape[1]
    out = rows.new_empty(num_tokens, size)
    run("add_rows", rows.dtype, rows, row_map, probs_TK, out, num_tokens, topk, size)
    return out


def _are_taken(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take tensors of this dtype, which must be one."""
    return has_dtype(x) and all(other.dtype == x.dtype for other in others)


def _rows(x: Tensor) -> Tensor:
    """x [..., D] as [rows, D] with neighbouring columns."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()
