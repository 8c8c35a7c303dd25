"""Op tables of planned devices: the tensors that kernels keep for the backward pass, and a given routing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops import TrainOps, reference_ops
from megatron.core.ops.cpu import cpu_ops
from megatron.core.ops.reference_attention import MAX_SCORES, attention_block, attention_block_grad
from megatron.core.ops.reference_moe import GroupedMatmulFunction, topk_router

STATISTICS_WIDTH = 8  # npu_fusion_attention keeps every row's maximum and sum in float32, eight times


@dataclass(frozen=True)
class Routing:
    """How the tokens of every rank spread over the experts, the same on all ranks.

    load: rows that reach this rank's experts, over the mean of the ranks that share them; 1 is balanced, and no rank
    can have more than ``num_ranks`` · first, num_local: this rank's experts · num_ranks: that share the experts.
    """

    load: float = 1.0
    first: int = 0
    num_local: int = 0
    num_ranks: int = 1

    def chosen(self, num_tokens: int, topk: int, num_experts: int) -> Tensor:
        """int64 [T, K] on the host."""
        total = num_tokens * topk
        choices = torch.arange(total)
        if self.load == 1.0 or self.num_ranks == 1:
            return (choices % num_experts).view(num_tokens, topk)
        share = min(self.load / self.num_ranks, self.num_local / topk, 1.0)
        num_here = round(total * share)
        here = self.first + choices[:num_here] % self.num_local
        others = choices[num_here:] % max(num_experts - self.num_local, 1)
        elsewhere = others + (others >= self.first) * self.num_local
        return torch.cat([here, elsewhere % num_experts]).view(num_tokens, topk)


def train_ops(device: str, routing: Routing, pads_values: bool = True) -> TrainOps:
    """The table that a run uses on ``device`` (cpu, cuda or npu), with its experts chosen by ``routing``.

    The one of npu keeps the tensors that torch_npu's kernels keep; its results have shapes and no values.
    pads_values: its attention widens values to the keys' head size.
    """
    table = cpu_ops() if device == "cpu" else reference_ops()
    if device != "cpu":
        table = replace(table, attention_block=_attention_block, attention_block_grad=_attention_block_grad)
        table = replace(table, core_attention=_padded_attention, grouped_matmul=_grouped_matmul)
    if device == "npu":
        table = replace(table, rms_norm=_rms_norm, swiglu=_swiglu, rotary_interleaved=_rotary)
        table = replace(table, core_attention=partial(_core_attention, pads_values=pads_values))

    def route(logits_TE: Tensor, *, topk: int, chosen_TK: Tensor | None = None, **how: Any) -> tuple[Tensor, Tensor]:
        chosen_TK = routing.chosen(logits_TE.shape[0], topk, logits_TE.shape[1])  # also where choices are replayed
        return topk_router(logits_TE, topk=topk, chosen_TK=chosen_TK, **how)

    return replace(table, topk_router=route)


class _Kept(torch.autograd.Function):
    """A kernel that keeps ``kept`` (its own statistics among them) and whose inputs have gradients of their shapes."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, kept: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.inputs = [(x.shape, x.dtype, x.device, x.requires_grad) for x in inputs]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018 - torch frees them here, as after a kernel
        grads = (
            torch.empty(shape, dtype=dtype, device=device) if is_wanted else None
            for shape, dtype, device, is_wanted in ctx.inputs
        )
        return None, None, *grads


def _kernel(out: Tensor, kept: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
    result: Tensor = _Kept.apply(out, kept, *inputs)
    return result


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    return _kernel(torch.empty_like(x), (x, weight, inverse), x, weight)


def _swiglu(x: Tensor) -> Tensor:
    return _kernel(x.new_empty(*x.shape[:-1], x.shape[-1] // 2), (x,), x)


def _rotary(x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _kernel(torch.empty(x_TNR.shape, dtype=x_TNR.dtype, device=x_TNR.device), (cos, sin), x_TNR)


def _core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool = True,
    *,
    pads_values: bool,
) -> Tensor:
    is_padded = pads_values and v.shape[-1] < q.shape[-1]
    wide_v = v.new_empty(*v.shape[:-1], q.shape[-1]) if is_padded else v
    statistics = tuple(
        torch.empty(q.shape[0], q.shape[1], STATISTICS_WIDTH, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    wide_out = q.new_empty(*q.shape[:-1], wide_v.shape[-1])
    out = wide_out[..., : v.shape[-1]]
    return _kernel(out, (q, k, wide_v, wide_out, *statistics), q, k, v)


def _padded_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
) -> Tensor:
    """The reference's attention: every sequence is padded to the longest, through torch's fused kernel."""
    rows = (cu_seqlens.numel() - 1) * max_seqlen
    padded = tuple(x.new_empty(rows, q.shape[1], q.shape[2]) for x in (q, k, v))
    log_sums = torch.empty(rows, q.shape[1], dtype=torch.float32, device=q.device)
    wide_out = q.new_empty(rows, q.shape[1], q.shape[2])
    return _kernel(q.new_empty(*q.shape[:2], v.shape[-1]), (*padded, wide_out, log_sums), q, k, v)


def _attention_block(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """The reference's attention of its first two pieces: all others need what the second does."""
    return attention_block(q, k, v, *_two_pieces(q, cu_seqlens_q, cu_seqlens_k), scale, causal)


def _attention_block_grad(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds = _two_pieces(q, cu_seqlens_q, cu_seqlens_k)
    return attention_block_grad(grad_out, q, k, v, out, lse, *bounds, scale, causal)


def _two_pieces(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of as many queries of the longest sequence as two of the reference's pieces have."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    (start_q, end_q), (start_k, end_k) = max(
        zip(pairwise(ends_q), pairwise(ends_k), strict=True),
        key=lambda bounds: (bounds[0][1] - bounds[0][0]) * (bounds[1][1] - bounds[1][0]),
    )
    step = max(1, MAX_SCORES // max(1, q.shape[1] * (end_k - start_k)))
    return torch.tensor([start_q, min(end_q, start_q + 2 * step)]), torch.tensor([start_k, end_k])


def _grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """All experts at once: on the meta device a loop over them would only take time."""
    out: Tensor = GroupedMatmulFunction.apply(x, w, [x.shape[0], *[0] * (w.shape[0] - 1)], _no_product)
    return out


def _no_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute nothing: the output has its shape already."""
