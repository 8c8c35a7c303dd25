"""Experts: their choice, the order of tokens, weighted sums and matmuls. Row counts stay on the device: no wait.

Limits: the products are torch's grouped_mm in bfloat16, whose widths must be multiples of 8; other dtypes go through
the reference, which reads the counts on the host. The other kernels take float32, bfloat16 and float16, and float32
weights and logits. Tolerance: the contract's, and the same experts except where scores tie.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops import reference_moe
from megatron.core.ops.contract import RouterRule
from megatron.core.ops.cuda.kernels import experts as kernels
from megatron.core.ops.cuda.launch import block_of, cdiv, has_dtype
from megatron.core.utils import async_h2d

_PART = 1024  # columns that a program takes at a time
_PRODUCTS = 4096  # elements of a weight gradient that a program takes
_MULTIPLE = 8  # bfloat16 elements in 16 bytes, which grouped_mm wants rows to be multiples of


def token_permute(tokens_TH: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
    """See ``contract.TokenPermute``; ``row_map`` is the reference's."""
    if not has_dtype(tokens_TH):
        return reference_moe.token_permute(tokens_TH, indices_TK)
    order, row_map = reference_moe.expert_order(indices_TK)
    rows: Tensor = _Permute.apply(tokens_TH, order, row_map, indices_TK.shape[1])
    return rows, row_map


class _Permute(reference_moe.PermuteFunction):
    """Rows by expert; the gradient adds each token's K rows as it reads them."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row_map,) = ctx.saved_tensors
        return _added_rows(grad.contiguous(), row_map, None, ctx.topk), None, None, None


def token_unpermute(rows: Tensor, row_map: Tensor, probs_TK: Tensor | None = None, topk: int = 1) -> Tensor:
    """See ``contract.TokenUnpermute``."""
    if not has_dtype(rows) or (probs_TK is not None and probs_TK.dtype != torch.float32):
        return reference_moe.token_unpermute(rows, row_map, probs_TK, topk)
    weights, topk = (None, topk) if probs_TK is None else (probs_TK.contiguous(), probs_TK.shape[1])
    out: Tensor = _Unpermute.apply(rows.contiguous(), row_map, weights, topk)
    return out


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_map: Tensor, probs_TK: Tensor | None, topk: int) -> Tensor:
        ctx.save_for_backward(row_map, *(() if probs_TK is None else (rows, probs_TK)))
        ctx.topk = topk
        return _added_rows(rows, row_map, probs_TK, topk)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        row_map, *weighted = ctx.saved_tensors
        grad_rows = grad_TH.new_empty(row_map.numel(), grad_TH.shape[1])
        rows, probs_TK = weighted or (grad_rows, None)
        grad_probs = None if probs_TK is None else torch.empty_like(probs_TK)
        if grad_rows.numel():
            width = grad_rows.shape[1]
            kernels.add_rows_grad[(row_map.numel(),)](
                grad_TH.contiguous(),
                rows,
                row_map,
                probs_TK,
                grad_rows,
                grad_probs,
                TOPK=ctx.topk,
                WIDTH=width,
                WEIGHTED=probs_TK is not None,
                BLOCK=block_of(width, _PART),
            )
        return grad_rows, None, grad_probs, None


def _added_rows(rows: Tensor, row_map: Tensor, probs_TK: Tensor | None, topk: int) -> Tensor:
    out = rows.new_empty(row_map.numel() // topk, rows.shape[1])
    if out.numel():
        block = block_of(out.shape[1], _PART)
        kernels.add_rows[(len(out), cdiv(out.shape[1], block))](
            rows, row_map, probs_TK, out, out.shape[1], TOPK=topk, WEIGHTED=probs_TK is not None, BLOCK=block
        )
    return out


def topk_router(
    logits_TE: Tensor, rule: RouterRule, expert_bias: Tensor | None = None, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``contract.TopkRouter``: one kernel chooses; the weights stay in torch, which has their gradient."""
    if chosen_TK is None and logits_TE.dtype == torch.float32:
        groups = (1, 0) if rule.num_groups is None or rule.group_topk is None else (rule.num_groups, rule.group_topk)
        scores = "sigmoid" if rule.score_function == "sigmoid" else "softmax" if rule.pre_softmax else "logits"
        chosen_TK = _choose(logits_TE.detach().contiguous(), rule.topk, *groups, scores, expert_bias)
    return reference_moe.topk_router(logits_TE, rule, expert_bias, chosen_TK)


def _choose(
    logits_TE: Tensor, topk: int, num_groups: int, group_topk: int, scores: str, expert_bias: Tensor | None
) -> Tensor:
    """``group_topk`` 0: there are no groups."""
    num_tokens, num_experts = logits_TE.shape
    chosen_TK = torch.empty(num_tokens, topk, dtype=torch.int64, device=logits_TE.device)
    group_size = num_experts // num_groups
    best_of_group = 0 if not group_topk else min(2 if scores == "sigmoid" else 1, group_size)
    if num_tokens:
        kernels.choose[(num_tokens,)](
            logits_TE,
            None if expert_bias is None else expert_bias.float().contiguous(),
            chosen_TK,
            group_size,
            num_groups,
            GROUP_TOPK=group_topk,
            TOPK=topk,
            HAS_BIAS=expert_bias is not None,
            SCORES=scores,
            BEST_OF_GROUP=best_of_group,
            GROUPS=block_of(num_groups),
            SIZE=block_of(group_size),
            num_warps=1,
        )
    return chosen_TK


def grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """See ``contract.GroupedMatmul``; weight gradients are rounded to w's dtype before they are added to main_grad."""
    if x.dtype != torch.bfloat16 or w.dtype != torch.bfloat16:
        return reference_moe.grouped_matmul(x, w, tokens_per_expert)
    if w.shape[1] % _MULTIPLE or w.shape[2] % _MULTIPLE:
        raise ValueError(
            f"experts of {w.shape[1]} x {w.shape[2]} on CUDA: torch's grouped_mm takes widths in multiples of "
            f"{_MULTIPLE}; choose others, or train with 'megatron.core.ops.reference:reference_ops'"
        )
    ends = async_h2d(tokens_per_expert, x.device).cumsum(0, dtype=torch.int32)
    out: Tensor = _GroupedMatmul.apply(x.contiguous(), w, ends)
    return out


class _GroupedMatmul(torch.autograd.Function):
    """``ends`` int32 [E] on the device: where each expert's rows end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        return F.grouped_mm(x, w, offs=ends) if len(x) else x.new_empty(0, w.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, ends = ctx.saved_tensors
        grad, grad_x, grad_w = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad, w.transpose(1, 2), offs=ends) if len(x) else torch.empty_like(x)
        if ctx.needs_input_grad[1]:
            grad_w = _weight_grad(x, w, ends, grad)
        return grad_x, grad_w, None


def _weight_grad(x: Tensor, w: Tensor, ends: Tensor, grad: Tensor) -> Tensor:
    """w's gradient, added to its main_grad where it has one.

    Nothing says that grouped_mm writes the zeros of experts without rows, so what it leaves there is not used.
    """
    sums = getattr(w, "main_grad", None)
    if not len(x):
        return torch.zeros_like(w)
    products = F.grouped_mm(x.t(), grad, offs=ends)
    size = products[0].numel()
    grid = len(products), cdiv(size, _PRODUCTS)
    if sums is None:
        kernels.clear_idle[grid](products, ends, size, BLOCK=_PRODUCTS)
    else:
        assert sums.untyped_storage().nbytes(), "backward while the gradients are offloaded"
        kernels.add_products[grid](sums, products, ends, size, BLOCK=_PRODUCTS)
        w.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return products
