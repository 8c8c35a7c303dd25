"""Attention over packed sequences through torch's flash attention, whole or in blocks of keys.

Flash attention takes half precision alone: other dtypes go through the reference. Heads narrower than the widest of q
and v get zeros up to it (MLA's values), and that up to a multiple of 8. Tolerance: 1e-2 relative.
Letters: T tokens, N query heads, M heads of keys and values, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops import reference_attention
from megatron.core.ops.contract import Attended, Bounds
from megatron.core.ops.cuda import flash
from megatron.core.ops.cuda.flash import Attend, AttendGrad, Sequences
from megatron.core.packed_seq_params import SharedPrompts
from megatron.core.utils import async_h2d

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FlashAttention:
    """The table's four entries of attention around a pair of kernels."""

    attend: Attend = flash.attend
    attend_grad: AttendGrad = flash.attend_grad

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
    ) -> Tensor:
        """See ``contract.CoreAttention``; backward keeps q, k and v as they came, the output and its log-sum-exp."""
        if q.dtype not in DTYPES:
            return reference_attention.core_attention(q, k, v, cu_seqlens, max_seqlen, scale, causal)
        bounds = async_h2d(cu_seqlens, q.device)
        sequences = Sequences(bounds, bounds, max_seqlen, max_seqlen)
        out: Tensor = _Attention.apply(q, k, v, self, sequences, scale, causal)
        return out

    def shared_prompts(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, shared: SharedPrompts
    ) -> Tensor:
        """See ``contract.SharedPromptAttention``: every prompt and every sample's own tokens attend to themselves, and
        the own tokens of all samples of a prompt, as one sequence, to the prompt; the two are joined.
        """
        if q.dtype not in DTYPES:
            core = reference_attention.core_attention
            return reference_attention.whole_sequence_attention(core, q, k, v, cu_seqlens, max_seqlen, scale, shared)
        out: Tensor = _SharedPromptAttention.apply(q, k, v, self, _SharedParts.of(shared, q.device), scale)
        return out

    def block(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool = True
    ) -> tuple[Tensor, Tensor]:
        """See ``contract.AttentionBlock``."""
        if q.dtype not in DTYPES:
            return reference_attention.attention_block(q, k, v, bounds, scale, causal)
        out, lse_NT = self.forward(q, k, v, _sequences(q, k, bounds), scale, causal)
        return out, lse_NT.t().contiguous()

    def block_grad(
        self, grad_out: Tensor, attended: Attended, bounds: Bounds, scale: float, causal: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``contract.AttentionBlockGrad``."""
        q, k, v, out, lse = attended
        if q.dtype not in DTYPES:
            return reference_attention.attention_block_grad(grad_out, attended, bounds, scale, causal)
        sequences = _sequences(q, k, bounds)
        return self.backward(grad_out, (q, k, v, out, lse.t().contiguous()), sequences, scale, causal)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """-> out [Tq, N, Dv], log-sum-exp float32 [N, Tq]."""
        width, size = _width(q, v), v.shape[-1]
        q, k, v = (_padded(x, width) for x in (q, k, v))
        out, lse_NT = self.attend(q, k, v, sequences, scale, causal)
        return out[..., :size].contiguous(), lse_NT

    def backward(
        self, grad: Tensor, attended: Attended, sequences: Sequences, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> gradients of q, k and v; the log-sum-exp of ``attended`` is [N, Tq]."""
        q, k, v, out, lse_NT = attended
        width, size, value_size = _width(q, v), q.shape[-1], v.shape[-1]
        grad, out = grad.to(q.dtype), out.to(q.dtype)
        grad, q, k, v, out = (_padded(x, width) for x in (grad, q, k, v, out))
        grad_q, grad_k, grad_v = self.attend_grad(grad, (q, k, v, out, lse_NT), sequences, scale, causal)
        return grad_q[..., :size], grad_k[..., :size], grad_v[..., :value_size]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: FlashAttention,
        sequences: Sequences,
        scale: float,
        causal: bool,
    ) -> Tensor:
        out, lse_NT = attention.forward(q, k, v, sequences, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse_NT)
        ctx.attention, ctx.arguments = attention, (sequences, scale, causal)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.attention.backward(grad, ctx.saved_tensors, *ctx.arguments)
        return *grads, None, None, None, None


@dataclass(frozen=True)
class _SharedParts:
    """own: the prompts and the samples' own parts, each a sequence · across: all own tokens of a prompt's samples as
    one sequence of queries, whose keys are the prompt's · queries, keys: int64, the tokens of ``across``.
    """

    own: Sequences
    across: Sequences
    queries: Tensor
    keys: Tensor

    @classmethod
    def of(cls, shared: SharedPrompts, device: torch.device) -> _SharedParts:
        parts: set[tuple[int, int]] = set()
        samples: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for prompt_start, prompt_end, start, end in shared.spans_B4.tolist():
            prompt, own = (prompt_start, prompt_end), (start, end)
            parts |= {part for part in (prompt, own) if part[1] > part[0]}
            if prompt_end > prompt_start and end > start:
                samples.setdefault(prompt, []).append(own)
        queries = [torch.cat([torch.arange(*own) for own in owns]) for owns in samples.values()]
        keys = [torch.arange(*prompt) for prompt in samples]
        nothing = torch.empty(0, dtype=torch.int64)
        lengths = [end - start for start, end in sorted(parts)]
        return cls(
            own=_packed(lengths, lengths, device),
            across=_packed([len(x) for x in queries], [len(x) for x in keys], device),
            queries=async_h2d(torch.cat((nothing, *queries)), device),
            keys=async_h2d(torch.cat((nothing, *keys)), device),
        )


class _SharedPromptAttention(torch.autograd.Function):
    """Backward keeps q, k and v as they came, the joined output and its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: FlashAttention, parts: _SharedParts, scale: float
    ) -> Tensor:
        out, lse_NT = attention.forward(q, k, v, parts.own, scale, True)
        if len(parts.queries):
            to_prompt = q[parts.queries], k[parts.keys], v[parts.keys]
            more, more_lse_NT = attention.forward(*to_prompt, parts.across, scale, False)
            joined, lse = out[parts.queries].float(), lse_NT[:, parts.queries].t().contiguous()
            reference_attention.merge(joined, lse, more, more_lse_NT.t())
            out[parts.queries] = joined.to(out.dtype)
            lse_NT[:, parts.queries] = lse.t()
        ctx.save_for_backward(q, k, v, out, lse_NT)
        ctx.attention, ctx.parts, ctx.scale = attention, parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse_NT), parts = ctx.saved_tensors, ctx.parts
        grads = ctx.attention.backward(grad, (q, k, v, out, lse_NT), parts.own, ctx.scale, True)
        queries, keys = parts.queries, parts.keys
        if not len(queries):
            return *grads, None, None, None
        of_queries = lse_NT[:, queries].contiguous()
        to_prompt = q[queries], k[keys], v[keys], out[queries], of_queries
        more = ctx.attention.backward(grad[queries], to_prompt, parts.across, ctx.scale, False)
        for whole, rows, part in zip(grads, (queries, keys, keys), more, strict=True):
            whole[rows] += part
        return *grads, None, None, None


def _packed(lengths_q: list[int], lengths_k: list[int], device: torch.device) -> Sequences:
    bounds_q, bounds_k = (
        async_h2d(torch.tensor([0, *lengths]).cumsum(0).int(), device) for lengths in (lengths_q, lengths_k)
    )
    return Sequences(bounds_q, bounds_k, max(lengths_q, default=0), max(lengths_k, default=0))


def _sequences(q: Tensor, k: Tensor, bounds: Bounds) -> Sequences:
    on_device = async_h2d(bounds[0], q.device), async_h2d(bounds[1], k.device)
    return Sequences(*on_device, _longest(bounds[0], q), _longest(bounds[1], k))


def _longest(cu_seqlens: Tensor, x: Tensor) -> int:
    """At least the longest sequence's tokens; bounds on the device are not read back, and give all tokens there are."""
    if cu_seqlens.device == x.device:
        return len(x)
    return max(end - start for start, end in pairwise(cu_seqlens.tolist()))


def _width(q: Tensor, v: Tensor) -> int:
    size = max(q.shape[-1], v.shape[-1])
    width = -(-size // flash.MULTIPLE) * flash.MULTIPLE
    if width > flash.MAX_SIZE:
        raise ValueError(
            f"heads of {size} on CUDA: flash attention takes up to {flash.MAX_SIZE}; "
            "train with 'megatron.core.ops.reference:reference_ops'"
        )
    return width


def _padded(x: Tensor, width: int) -> Tensor:
    """x [T, N, D] with heads of ``width``, rows as the kernel reads them: 16 bytes at a time."""
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    starts = (*x.stride()[:-1], x.storage_offset())
    is_aligned = x.stride(-1) == 1 and not any(start % flash.MULTIPLE for start in starts)
    return x if is_aligned else x.contiguous()
