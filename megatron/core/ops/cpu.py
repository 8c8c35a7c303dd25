"""The op table of a CPU: the reference, except for the ops that a CPU computes faster in another way."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.contract import TrainOps
from megatron.core.ops.fused_adamw import adamw_step
from megatron.core.ops.reference import reference_ops
from megatron.core.ops.reference_moe import GroupedMatmulFunction

# Linux's names of the instructions that multiply bfloat16. Without one of them torch multiplies bfloat16 several times
# slower than float32, so the products are made from float32 copies and rounded once.
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
# float32 copies and their products are made in chunks of about this many elements (64 MiB) and at least this many rows:
# the logits of a large vocabulary would otherwise take more memory than all the layers.
_WIDE_ELEMENTS, _MIN_WIDE_ROWS = 1 << 24, 256
_NATIVE = ("matmul", "grouped_matmul", "core_attention", "adamw_step")


def cpu_ops() -> TrainOps:
    """Matmuls in float32 where bfloat16 has no instruction; attention without padding; AdamW in one pass."""
    table = reference_ops()
    names = table.names | dict.fromkeys(_NATIVE, "native")
    return replace(
        table,
        matmul=matmul,
        grouped_matmul=grouped_matmul,
        core_attention=core_attention,
        adamw_step=adamw_step,
        names=names,
    )


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products."""
    return not instructions().isdisjoint(_BFLOAT16_INSTRUCTIONS)


@cache
def instructions() -> frozenset[str]:
    """Linux's names of what this processor can do; torch 2.5 has no function for it."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """See ``contract.Matmul``."""
    out = a.new_empty(a.shape[0], b.shape[1])
    _mm_into(a, b, out)
    return out


def grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """See ``contract.GroupedMatmul``; only one expert's weight is widened at a time."""
    out: Tensor = GroupedMatmulFunction.apply(x, w, tokens_per_expert.tolist(), _mm_into)
    return out


def core_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
) -> Tensor:
    """See ``contract.CoreAttention``.

    Only neighbouring sequences of one length share a kernel call, so that nothing is padded or gathered. Backward keeps
    the inputs and the output in their dtype, and the log-sum-exp of each row.
    """
    out: Tensor = _Attention.apply(q, k, v, cu_seqlens.tolist(), scale, causal)
    return out


class _Attention(torch.autograd.Function):
    """torch's fused CPU kernel on views of the packed tokens; it needs keys and values of one head size."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float, causal: bool) -> Tensor:
        runs = _runs(bounds)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        wide = _wide(q, k, v)
        sums = []
        for run in runs:
            attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(run.rectangle(x) for x in wide), 0.0, causal, scale=scale
            )
            run.rectangle(out).copy_(attended[..., : v.shape[-1]])
            sums.append(log_sum)
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.arguments = runs, scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        runs, scale, causal = ctx.arguments
        q, k, v, out, *sums = ctx.saved_tensors
        wide = _wide(q, k, v)
        wide_grad, wide_out = (_padded(x, wide[0].shape[-1]) for x in (grad, out))
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for run, log_sum in zip(runs, sums, strict=True):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                run.rectangle(wide_grad),
                *(run.rectangle(x) for x in wide),
                run.rectangle(wide_out),
                log_sum,
                0.0,
                causal,
                scale=scale,
            )
            for whole, part in zip(grads, parts, strict=True):
                target = run.rectangle(whole)
                heads = target.shape[1]  # the gradients of all query heads of one key head are added up
                part = part[..., : target.shape[-1]]
                target.copy_(part if part.shape[1] == heads else part.unflatten(1, (heads, -1)).sum(2))
        return *grads, None, None, None


class _Run(NamedTuple):
    """``num_sequences`` sequences of ``length`` tokens, one after the other from token ``start`` on."""

    start: int
    num_sequences: int
    length: int

    def rectangle(self, x: Tensor) -> Tensor:
        """The view [num_sequences, N, length, D] of these sequences in x [T, N, D]."""
        rows = x[self.start : self.start + self.num_sequences * self.length]
        return rows.unflatten(0, (self.num_sequences, self.length)).transpose(1, 2)


def _runs(bounds: list[int]) -> list[_Run]:
    runs = []
    start = 0
    for length, neighbours in groupby(stop - start for start, stop in pairwise(bounds)):
        count = len(list(neighbours))
        if length > 0:
            runs.append(_Run(start, count, length))
        start += count * length
    return runs


def _wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in the kernel's form: a key and value head for each query head, all of one head size."""
    repeats, size = q.shape[1] // k.shape[1], max(q.shape[-1], v.shape[-1])
    k, v = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (k, v))
    return _padded(q, size), _padded(k, size), _padded(v, size)


def _padded(x: Tensor, size: int) -> Tensor:
    """x in the dtype of the products, with zeros up to a last dimension of ``size``."""
    x = x.float() if _is_widened(x) else x
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _mm_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    if not _is_widened(a):
        torch.mm(a, b, out=out)
        return
    wide_b = b.float()
    rows = max(_MIN_WIDE_ROWS, _WIDE_ELEMENTS // sum(b.shape))
    for a_part, out_part in zip(a.split(rows), out.split(rows), strict=True):
        out_part.copy_(torch.mm(a_part.float(), wide_b))


def _is_widened(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and not multiplies_bfloat16()
