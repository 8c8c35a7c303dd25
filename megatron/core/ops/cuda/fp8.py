"""FP8 products of linear layers and of experts: the arithmetic of ``reference_fp8``, in Triton; by cuBLAS on Hopper in
linear layers of many tokens.

The kernels take bfloat16, float16 and float32 of any widths, on sm_90 and later; quick are widths in multiples of 128.
Quantised copies live for one product. Weight gradients are added to a ``main_grad`` in float32. Tolerance: 1e-2 of
``reference_fp8`` in bfloat16, 1e-5 in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_formats.fp8 import BLOCK, FP8_DTYPE, num_blocks
from megatron.core.ops.cuda.kernels import fp8 as kernels
from megatron.core.utils import async_h2d

_ROWS, _COLUMNS = 32, 64  # of a program that quantises
_CUBLAS_TOKENS = 1024  # from which on cuBLAS multiplies, where torch has its products of blocks
_ROWS_TOGETHER = 8  # blocks of tokens that programs beside one another share columns of

ScaledMM = Callable[..., Tensor]


def products_of_cublas() -> ScaledMM | None:
    """torch's, on the one kind of GPU that cuBLAS multiplies blocks on: Hopper, from CUDA 12.9 on."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    return torch._scaled_mm if [int(part) for part in (torch.version.cuda or "0").split(".")] >= [12, 9] else None


@dataclass(frozen=True)
class TokenBlocks:
    """T tokens in blocks of 128 (see ``kernels.fp8``); ``ends`` and ``experts`` are None for a linear layer's."""

    num_rows: int
    num_blocks: int
    ends: Tensor | None = None
    experts: Tensor | None = None

    @classmethod
    def of(cls, num_rows: int, tokens_per_expert: Tensor | None, device: torch.device) -> TokenBlocks:
        if tokens_per_expert is None:
            return cls(num_rows, num_blocks(num_rows))
        counts = async_h2d(tokens_per_expert, device)
        ends = counts.cumsum(0)
        first_blocks = (ends - counts) // BLOCK + torch.arange(len(counts), device=device)
        total = num_blocks(num_rows) + len(counts) - 1
        experts = torch.searchsorted(first_blocks, torch.arange(total, device=device), right=True, out_int32=True) - 1
        return cls(num_rows, total, ends.int(), experts)


class Fp8Products:
    """See ``contract.LinearProducts``. scaled_mm: ``torch._scaled_mm`` where it multiplies blocks."""

    def __init__(self, scaled_mm: ScaledMM | None = None) -> None:
        self._scaled_mm = scaled_mm

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self._multiply(x, w, transposed=False)

    def dgrad(self, grad: Tensor, w: Tensor) -> Tensor:
        return self._multiply(grad, w, transposed=True)

    def wgrad(self, grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
        outputs, inputs = w.shape
        if not self._takes(x, outputs, inputs, 4 * BLOCK):
            return _weight_grad(grad, x, w, TokenBlocks.of(len(x), None, x.device))
        return _weight_grad(grad, x, w, TokenBlocks(len(x), -(-len(x) // (4 * BLOCK)) * 4), self._scaled_mm)

    def _multiply(self, x: Tensor, w: Tensor, *, transposed: bool) -> Tensor:
        width, inner = w.shape[::-1] if transposed else w.shape
        if not self._takes(x, 16, width, inner):
            return _multiply(x, w.unsqueeze(0), TokenBlocks.of(len(x), None, x.device), transposed=transposed)
        (values, scales), (w_values, w_scales) = (
            _quantized_rows(x, -(-len(x) // 4) * 4),
            _quantized_weight(w[None], transposed),
        )
        by = {"scale_a": scales.t(), "scale_b": w_scales[0].t(), "out_dtype": x.dtype}
        return self._scaled_mm(values, w_values[0].t(), **by)[: len(x)]  # type: ignore[misc]

    def _takes(self, x: Tensor, rows: int, width: int, inner: int) -> bool:
        """Whether cuBLAS takes [rows, inner] by [inner, width] of these tokens: it reads scales by 16 bytes."""
        is_whole = rows % 16 == width % 16 == 0 and inner % (4 * BLOCK) == 0
        return self._scaled_mm is not None and len(x) >= _CUBLAS_TOKENS and x.dtype is torch.bfloat16 and is_whole


def grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """See ``contract.GroupedMatmul``; backward keeps x and w as they came."""
    blocks = TokenBlocks.of(len(x), tokens_per_expert, x.device)
    out: Tensor = _GroupedMatmul.apply(x, w, blocks)
    return out


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, blocks: TokenBlocks) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.blocks = blocks
        return _multiply(x, w, blocks, transposed=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        grad_x = _multiply(grad, w, ctx.blocks, transposed=False) if ctx.needs_input_grad[0] else None
        grad_w = _weight_grad(x, grad, w, ctx.blocks) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def _multiply(x: Tensor, w: Tensor, blocks: TokenBlocks, *, transposed: bool) -> Tensor:
    """x [T, K] by each one's expert of w [E, N, K], or transposed [E, K, N] -> [T, N]."""
    inner = x.shape[1]
    width = w.shape[2] if transposed else w.shape[1]
    out = x.new_empty(len(x), width)
    if len(x):
        values, scales = _quantized_rows(x)
        w_values, w_scales = _quantized_weight(w, transposed)
        grid = (blocks.num_blocks * num_blocks(width),)
        kernels.multiply[grid](
            values,
            scales,
            w_values,
            w_scales,
            out,
            blocks.ends,
            blocks.experts,
            len(x),
            blocks.num_blocks,
            width,
            inner,
            GROUPED=blocks.ends is not None,
            ROWS_TOGETHER=_ROWS_TOGETHER,
            num_warps=8,
            num_stages=4,
        )
    return out


def _weight_grad(a: Tensor, b: Tensor, w: Tensor, blocks: TokenBlocks, scaled_mm: ScaledMM | None = None) -> Tensor:
    """The sum over tokens of a [T, A] by b [T, B], for each expert of w [E, A, B] or for w [A, B]."""
    sums = getattr(w, "main_grad", None)
    out = torch.empty_like(w)
    if sums is not None:
        assert sums.untyped_storage().nbytes(), "backward while the gradients are offloaded"
        w.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if not len(a):
        return out.zero_()
    pairs = [*_quantized_tokens(a, blocks), *_quantized_tokens(b, blocks)]
    if scaled_mm is not None:
        (left, left_scales), (right, right_scales) = pairs[:2], pairs[2:]
        by = {"scale_a": left_scales.t(), "scale_b": right_scales, "out_dtype": torch.float32}
        product = scaled_mm(left, right.t(), **by)
        (out.copy_ if sums is None else sums.add_)(product)
        return out
    grid = num_blocks(a.shape[1]), num_blocks(b.shape[1]), w.shape[0] if w.dim() == 3 else 1
    kernels.multiply_tokens[grid](
        *pairs,
        out if sums is None else sums,
        blocks.ends,
        blocks.num_rows,
        blocks.num_blocks,
        a.shape[1],
        b.shape[1],
        GROUPED=blocks.ends is not None,
        ADDS=sums is not None,
        num_warps=8,
        num_stages=4,
    )
    return out


def _quantized_rows(x: Tensor, num_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """num_rows: with room for so many."""
    x, num_rows = x if x.stride(1) == 1 else x.contiguous(), num_rows or len(x)
    values = torch.empty(num_rows, x.shape[1], dtype=FP8_DTYPE, device=x.device)
    scales = torch.empty(num_blocks(x.shape[1]), num_rows, dtype=torch.float32, device=x.device)
    grid = -(-len(x) // _ROWS), len(scales)
    kernels.quantize_rows[grid](x, values, scales, *x.shape, x.stride(0), num_rows, ROWS=_ROWS)
    return values, scales


def _quantized_tokens(x: Tensor, blocks: TokenBlocks) -> tuple[Tensor, Tensor]:
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty(x.shape[1], blocks.num_blocks * BLOCK, dtype=FP8_DTYPE, device=x.device)
    scales = torch.empty(blocks.num_blocks, x.shape[1], dtype=torch.float32, device=x.device)
    kernels.quantize_tokens[blocks.num_blocks, -(-x.shape[1] // _COLUMNS)](
        x,
        values,
        scales,
        blocks.ends,
        blocks.experts,
        *x.shape,
        x.stride(0),
        blocks.num_blocks,
        GROUPED=blocks.ends is not None,
        COLUMNS=_COLUMNS,
    )
    return values, scales


def _quantized_weight(w: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    num_experts, rows, columns = w.shape
    shape, in_blocks = [rows, columns], [num_blocks(rows), num_blocks(columns)]
    if transposed:
        shape, in_blocks = shape[::-1], in_blocks[::-1]
    values = torch.empty(num_experts, *shape, dtype=FP8_DTYPE, device=w.device)
    scales = torch.empty(num_experts, *in_blocks, dtype=torch.float32, device=w.device)
    kernels.quantize_weight[num_blocks(rows), num_blocks(columns), num_experts](
        w.contiguous(), values, scales, rows, columns, TRANSPOSED=transposed, num_warps=8
    )
    return values, scales
