"""Attention over packed sequences on a CPU: all of them in one kernel, in float32 arithmetic.

Where the processor multiplies bfloat16, long sequences in bfloat16 go through torch's kernel, which uses that.
Letters: T packed tokens, N query heads, M heads of keys and values, D head size, L tokens of a sequence.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops import reference
from megatron.core.ops.cpu.build import has_dtype, run
from megatron.core.ops.cpu.instructions import multiplies_bfloat16

_LONG = 128  # tokens from which torch's kernel is worth a call of its own


def core_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
) -> Tensor:
    """See ``contract.CoreAttention``. Nothing is padded or gathered; our kernel's backward keeps the inputs alone."""
    if not has_dtype(q):
        return reference.core_attention(q, k, v, cu_seqlens, max_seqlen, scale, causal)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out: Tensor = _Attention.apply(q, k, v, cu_seqlens.tolist(), scale, causal)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float, causal: bool) -> Tensor:
        spans = [(start, stop) for start, stop in pairwise(bounds) if stop > start]
        is_multiplied = q.dtype == torch.bfloat16 and multiplies_bfloat16()
        long = [slice(*span) for span in spans if is_multiplied and span[1] - span[0] >= _LONG]
        ours = [span for span in spans if not is_multiplied or span[1] - span[0] < _LONG]
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        if ours:
            run("attention", q.dtype, q, k, v, *_places(q, k, v, ours), out, *_sizes(q, k, v, ours), scale, causal)
        sums = []
        for rows in long:
            attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_same_size(*_heads(q, k, v, rows)), 0.0, causal, scale=scale
            )
            out[rows] = attended[0, ..., : v.shape[-1]].transpose(0, 1)
            sums.append(log_sum)
        ctx.save_for_backward(q, k, v, out if sums else None, *sums)
        ctx.arguments = ours, long, scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ours, long, scale, causal = ctx.arguments
        q, k, v, out, *sums = ctx.saved_tensors
        grad, grads = grad.contiguous(), [x.new_empty(x.shape) for x in (q, k, v)]
        if ours:
            inputs = grad, q, k, v, *_places(q, k, v, ours)
            run("attention_grad", q.dtype, *inputs, *grads, *_sizes(q, k, v, ours), scale, causal)
        for rows, log_sum in zip(long, sums, strict=True):
            heads = (grad[rows].transpose(0, 1), out[rows].transpose(0, 1), *_heads(q, k, v, rows))
            wide_grad, wide_out, *wide = _same_size(*heads)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                wide_grad, *wide, wide_out, log_sum, 0.0, causal, scale=scale
            )
            for whole, part in zip(grads, parts, strict=True):
                whole[rows] = _summed(part[0, ..., : whole.shape[-1]], whole.shape[1]).transpose(0, 1)
        return *grads, None, None, None


def _places(q: Tensor, k: Tensor, v: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return for the kernel: bounds of the sequences, and the strides of a token and of a head of q, k and v."""
    strides = torch.tensor([x.stride()[:2] for x in (q, k, v)], device=q.device)
    return torch.tensor(spans, device=q.device), strides


def _sizes(q: Tensor, k: Tensor, v: Tensor, spans: list[tuple[int, int]]) -> tuple[int, ...]:
    longest = max(stop - start for start, stop in spans)
    return len(spans), longest, q.shape[1], k.shape[1], q.shape[2], v.shape[2]


def _heads(q: Tensor, k: Tensor, v: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of one sequence as [N, L, D]."""
    q_NLD, k_MLD, v_MLD = (x[rows].transpose(0, 1) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k_MLD, v_MLD = (x.repeat_interleave(repeats, dim=0) for x in (k_MLD, v_MLD))
    return q_NLD, k_MLD, v_MLD


def _summed(grad: Tensor, num_heads: int) -> Tensor:
    """Add up the gradients [N, L, D] of all query heads that share a head of keys or values."""
    return grad if grad.shape[0] == num_heads else grad.unflatten(0, (num_heads, -1)).sum(1)


def _same_size(*tensors: Tensor) -> list[Tensor]:
    """[N, L, D] each -> [1, N, L, the largest D]: torch's kernel wants one size, zeros are added."""
    size = max(x.shape[-1] for x in tensors)
    padded = (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in tensors)
    return [x.unsqueeze(0) for x in padded]
