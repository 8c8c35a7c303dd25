"""The table of a CPU: the reference, but for the ops where a CPU wants another way to the same result."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.ops.contract import TrainOps
from megatron.core.ops.reference import reference_ops
from megatron.core.ops.reference_moe import GroupedMatmulFunction

# What torch calls the instructions that multiply bfloat16; without one of them it multiplies several times slower than
# in float32, so there the products are made from float32 copies and rounded once.
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
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
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BFLOAT16_INSTRUCTIONS)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """See ``contract.Matmul``."""
    return torch.mm(a.float(), b.float()).to(a.dtype) if _is_widened(a) else torch.mm(a, b)


def grouped_matmul(x: torch.Tensor, w: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """See ``contract.GroupedMatmul``; only one expert's weight is widened at a time."""
    out: torch.Tensor = GroupedMatmulFunction.apply(x, w, tokens_per_expert.tolist(), _mm_into)
    return out


def core_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool = True,
) -> torch.Tensor:
    """See ``contract.CoreAttention``.

    Sequences of one length go together, so that no time is spent on padding. Backward attends again: nothing is kept
    but the inputs, in their dtype.
    """
    out: torch.Tensor = _Attention.apply(q, k, v, cu_seqlens.tolist(), scale, causal)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], scale: float, causal: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.arguments = bounds, scale, causal
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for rows_BL in _by_length(bounds):
            out[rows_BL.flatten()] = _attend(q, k, v, rows_BL, scale, causal).to(out.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bounds, scale, causal = ctx.arguments
        inputs = [tensor.detach() for tensor in ctx.saved_tensors]
        grads = [torch.zeros_like(tensor) for tensor in inputs]
        for rows_BL in _by_length(bounds):
            rows = rows_BL.flatten()
            q, k, v = parts = [tensor[rows].requires_grad_() for tensor in inputs]
            with torch.enable_grad():
                out = _attend(q, k, v, torch.arange(len(rows)).view_as(rows_BL), scale, causal)
            for whole, part in zip(grads, torch.autograd.grad(out, parts, grad[rows].to(out.dtype)), strict=True):
                whole[rows] = part
        return *grads, None, None, None


def _by_length(bounds: list[int]) -> list[torch.Tensor]:
    """Rows of all sequences of one length, int64 [B, L], for every length."""
    starts: dict[int, list[int]] = {}
    for start, stop in pairwise(bounds):
        starts.setdefault(stop - start, []).append(start)
    return [torch.tensor(firsts).unsqueeze(1) + torch.arange(length) for length, firsts in starts.items() if length > 0]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows_BL: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """[B * L, N, Dv] of the sequences at ``rows_BL``; v is padded to q's head size, as torch's fused kernel wants."""

    def rectangle(x: torch.Tensor) -> torch.Tensor:
        x_BLND = x[rows_BL]
        return (x_BLND.float() if _is_widened(x) else x_BLND).transpose(1, 2)

    value_size = v.shape[-1]
    if value_size < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - value_size))
    out_BNLD = F.scaled_dot_product_attention(
        rectangle(q), rectangle(k), rectangle(v), is_causal=causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return out_BNLD.transpose(1, 2).flatten(0, 1)[..., :value_size]


def _mm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if _is_widened(a):
        out.copy_(torch.mm(a.float(), b.float()))
    else:
        torch.mm(a, b, out=out)


def _is_widened(x: torch.Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and not multiplies_bfloat16()


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """See ``contract.AdamwStep``: torch's fused kernel, which reads and writes each value once, on all its threads.

    Without temporaries; moments equal the reference's bits, weights to 1e-6 relative. CPU Adam updates with it too.
    """
    torch._fused_adamw_(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(step))],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
