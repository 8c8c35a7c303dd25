"""FP8 products of training in plain torch: what is rounded to e4m3 blocks, and float32 products of what that leaves.

DeepSeek-V3's report (arXiv:2412.19437, sec. 3.3): activations and gradients have a float32 scale for every 128 elements
along the dimension that a product adds up, weights one for every 128 x 128; a product is added up in float32. Where we
differ: what backward needs is kept in its own dtype and rounded from there, for the weight gradient along tokens,
where the report keeps FP8 copies; and no scales are rounded to powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_formats.fp8 import BLOCK, FP8_DTYPE, dequantize, quantize, scales_of_peaks


def rounded_rows(x: Tensor) -> Tensor:
    """x [T, K] -> float32 [T, K]: what 1 x 128 blocks of e4m3 leave of it."""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = scales_of_peaks(blocks.abs().amax(-1, keepdim=True))
    return ((blocks / scales).to(FP8_DTYPE).float() * scales).flatten(1)[:, : x.shape[1]]


def rounded_tokens(x: Tensor) -> Tensor:
    """x [T, C] -> float32 [T, C]: what blocks of 128 tokens of a column leave of it."""
    return rounded_rows(x.t()).t()


def rounded_weight(w: Tensor) -> Tensor:
    """w [N, K] -> float32 [N, K]: what 128 x 128 blocks of e4m3 leave of it."""
    return dequantize(quantize(w.detach()), torch.float32)


class Fp8Products:
    """See ``contract.LinearProducts``."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (rounded_rows(x) @ rounded_weight(w).t()).to(x.dtype)

    def dgrad(self, grad: Tensor, w: Tensor) -> Tensor:
        return (rounded_rows(grad) @ rounded_weight(w)).to(grad.dtype)

    def wgrad(self, grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return (rounded_tokens(grad).t() @ rounded_tokens(x)).to(w.dtype)


def grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """See ``contract.GroupedMatmul``; an expert's blocks of tokens begin at its first row."""
    out: Tensor = _GroupedMatmul.apply(x, w, tokens_per_expert)
    return out


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.counts = tokens_per_expert.tolist()
        products = Fp8Products()
        pairs = zip(x.split(ctx.counts), w, strict=True)
        return torch.cat([products.forward(rows, w_e.t()) for rows, w_e in pairs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        products, by_expert = Fp8Products(), list(zip(grad.split(ctx.counts), x.split(ctx.counts), w, strict=True))
        grad_x = torch.cat([products.dgrad(grad_e, w_e.t()) for grad_e, _, w_e in by_expert])
        grad_w = torch.stack([products.wgrad(x_e, grad_e, w_e) for grad_e, x_e, w_e in by_expert])
        return grad_x, grad_w, None
