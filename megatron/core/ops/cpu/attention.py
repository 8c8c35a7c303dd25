"""Attention over packed sequences on a CPU: all of them in one kernel, in float32 arithmetic.

Where the processor multiplies bfloat16, very long sequences in bfloat16 go through torch's kernel, which uses that.
Letters: T packed tokens, N query heads, M heads of keys and values, D head size, L tokens of a sequence.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops import reference
from megatron.core.ops.cpu.build import has_dtype, run
from megatron.core.ops.cpu.instructions import multiplies_bfloat16, multiplies_tiles
from megatron.core.ops.reference_attention import whole_sequence_attention
from megatron.core.packed_seq_params import SharedPrompts

# Tokens from which torch's kernel is quicker. Each sequence is a call of its own, and its backward alone costs
# milliseconds: with AVX512-BF16, 9 heads of 64 or 16 of 192, it takes 3 to 6 times as long up to 512 tokens.
_LONG, _LONG_WITH_TILES = 4096, 512


def core_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
) -> Tensor:
    """See ``contract.CoreAttention``. Nothing is padded or gathered; our kernel's backward keeps the inputs alone."""
    if not has_dtype(q):
        return reference.core_attention(q, k, v, cu_seqlens, max_seqlen, scale, causal)
    long = []
    shortest = _shortest_for_torch(q)
    if max_seqlen >= shortest:
        long = [slice(*span) for span in pairwise(cu_seqlens.tolist()) if span[1] - span[0] >= shortest]
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    spans_B4 = torch.stack((starts, starts, starts, ends), 1)
    return _attend(q, k, v, spans_B4[ends - starts < shortest] if long else spans_B4, long, scale, causal)


def shared_prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, shared: SharedPrompts
) -> Tensor:
    """See ``contract.SharedPromptAttention``: a prompt attends once, and each sequence's own tokens to it."""
    if not has_dtype(q) or max_seqlen >= _shortest_for_torch(q):
        return whole_sequence_attention(core_attention, q, k, v, cu_seqlens, max_seqlen, scale, shared)
    return _attend(q, k, v, shared.spans_B4, [], scale, True)


def _shortest_for_torch(q: Tensor) -> float:
    """Tokens of the shortest sequence that is left to torch's kernel."""
    if q.dtype != torch.bfloat16 or not multiplies_bfloat16():
        return math.inf
    return _LONG_WITH_TILES if multiplies_tiles() else _LONG


def _attend(q: Tensor, k: Tensor, v: Tensor, spans_B4: Tensor, long: list[slice], scale: float, causal: bool) -> Tensor:
    """spans_B4: the sequences for our kernel, as in ``SharedPrompts``; long: those for torch's."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out: Tensor = _Attention.apply(q, k, v, spans_B4, long, scale, causal)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans_B4: Tensor, long: list[slice], scale: float, causal: bool
    ) -> Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        run("attention", q.dtype, q, k, v, *_places(q, k, v, spans_B4), out, *_sizes(q, k, v, spans_B4), scale, causal)
        sums = []
        for rows in long:
            attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_same_size(*_heads(q, k, v, rows)), 0.0, causal, scale=scale
            )
            out[rows] = attended[0, ..., : v.shape[-1]].transpose(0, 1)
            sums.append(log_sum)
        ctx.save_for_backward(q, k, v, out if sums else None, *sums)
        ctx.arguments = spans_B4, long, scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spans_B4, long, scale, causal = ctx.arguments
        q, k, v, out, *sums = ctx.saved_tensors
        grad, grads = grad.contiguous(), [x.new_empty(x.shape) for x in (q, k, v)]
        inputs = grad, q, k, v, *_places(q, k, v, spans_B4)
        run("attention_grad", q.dtype, *inputs, *grads, *_sizes(q, k, v, spans_B4), scale, causal)
        for rows, log_sum in zip(long, sums, strict=True):
            heads = (grad[rows].transpose(0, 1), out[rows].transpose(0, 1), *_heads(q, k, v, rows))
            wide_grad, wide_out, *wide = _same_size(*heads)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                wide_grad, *wide, wide_out, log_sum, 0.0, causal, scale=scale
            )
            for whole, part in zip(grads, parts, strict=True):
                whole[rows] = _summed(part[0, ..., : whole.shape[-1]], whole.shape[1]).transpose(0, 1)
        return *grads, None, None, None, None


def _places(q: Tensor, k: Tensor, v: Tensor, spans_B4: Tensor) -> tuple[Tensor, Tensor]:
    """Return for the kernel: the spans, and the strides of a token and of a head of q, k and v."""
    strides = torch.tensor([x.stride()[:2] for x in (q, k, v)], device=q.device)
    return spans_B4.to(q.device), strides


def _sizes(q: Tensor, k: Tensor, v: Tensor, spans_B4: Tensor) -> tuple[int, ...]:
    return len(spans_B4), q.shape[1], k.shape[1], q.shape[2], v.shape[2]


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
