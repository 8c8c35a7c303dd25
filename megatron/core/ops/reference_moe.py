"""Routing, sorting and grouped matmul of experts in plain torch, with hand-written gradients where they save time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.contract import RouterRule


def topk_router(
    logits_TE: Tensor, rule: RouterRule, expert_bias: Tensor | None = None, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``contract.TopkRouter``. Groups that lost are masked with -inf, so that negative scores cannot win either."""
    is_sigmoid = rule.score_function == "sigmoid"
    if is_sigmoid:
        scores_TE = logits_TE.sigmoid()
    else:
        scores_TE = logits_TE.softmax(-1) if rule.pre_softmax else logits_TE
    indices_TK = chosen_TK
    if indices_TK is None:
        choice_TE = scores_TE.detach()
        if expert_bias is not None:
            choice_TE = choice_TE + expert_bias
        if rule.num_groups is not None and rule.group_topk is not None:
            choice_TE = _keep_best_groups(choice_TE, rule.num_groups, rule.group_topk, 2 if is_sigmoid else 1)
        indices_TK = choice_TE.topk(rule.topk, dim=-1, sorted=False).indices
    probs_TK = scores_TE.gather(1, indices_TK)
    if is_sigmoid and rule.norm_topk_prob and rule.topk > 1:
        probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + 1e-20)
    elif not is_sigmoid and not rule.pre_softmax:
        probs_TK = probs_TK.softmax(-1)
    return (probs_TK if rule.scaling_factor is None else probs_TK * rule.scaling_factor), indices_TK


def _keep_best_groups(choice_TE: Tensor, num_groups: int, group_topk: int, best_of_group: int) -> Tensor:
    grouped = choice_TE.unflatten(-1, (num_groups, -1))
    best_of_group = min(best_of_group, grouped.shape[-1])
    group_scores = grouped.topk(best_of_group, dim=-1).values.sum(-1)
    winners = group_scores.topk(group_topk, dim=-1, sorted=False).indices
    lost = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, winners, False)
    return grouped.masked_fill(lost.unsqueeze(-1), float("-inf")).flatten(-2)


def token_permute(tokens_TH: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
    """See ``contract.TokenPermute``; here row_map[t*K + k] is the row of choice k of token t."""
    order, row_map = expert_order(indices_TK)
    rows: Tensor = PermuteFunction.apply(tokens_TH, order, row_map, indices_TK.shape[1])
    return rows, row_map


def expert_order(indices_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return which choice (t*K + k) each row is, by expert and stable, and the row of each choice; int64 [T*K]."""
    order = indices_TK.flatten().argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def token_unpermute(rows: Tensor, row_map: Tensor, probs_TK: Tensor | None = None, topk: int = 1) -> Tensor:
    """See ``contract.TokenUnpermute``; ``topk`` is read only when there are no probs."""
    if probs_TK is None:
        by_token = _Reorder.apply(rows, row_map)
        return by_token if topk == 1 else by_token.unflatten(0, (-1, topk)).sum(1)
    weighted: Tensor = _WeightedUnpermute.apply(rows, row_map, probs_TK)
    return weighted


class PermuteFunction(torch.autograd.Function):
    """Rows by expert; the gradient gathers each token's K rows and adds them, where autograd would scatter-add."""

    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, order: Tensor, row_map: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(row_map)
        ctx.topk = topk
        return tokens_TH.index_select(0, order if topk == 1 else order // topk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row_map,) = ctx.saved_tensors
        return grad.index_select(0, row_map).unflatten(0, (-1, ctx.topk)).sum(1), None, None, None


class _Reorder(torch.autograd.Function):
    """``rows[row_map]`` for a permutation row_map."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_map: Tensor) -> Tensor:
        ctx.save_for_backward(row_map)
        return rows.index_select(0, row_map)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row_map,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, row_map, grad), None


class _WeightedUnpermute(torch.autograd.Function):
    """Rows back in token order, weighted and added; keeps the permuted rows only, not their copy in token order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_map: Tensor, probs_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows, row_map, probs_TK)
        rows_TKH = rows.index_select(0, row_map).view(*probs_TK.shape, rows.shape[-1])
        return (rows_TKH.to(probs_TK.dtype).mul_(probs_TK.unsqueeze(-1))).sum(1).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        rows, row_map, probs_TK = ctx.saved_tensors
        grad_TH = grad_TH.to(probs_TK.dtype).unsqueeze(1)
        rows_TKH = rows.index_select(0, row_map).view(*probs_TK.shape, rows.shape[-1])
        grad_probs = (rows_TKH * grad_TH).sum(-1)
        by_token = (grad_TH * probs_TK.unsqueeze(-1)).flatten(0, 1).to(rows.dtype)
        return torch.empty_like(rows).index_copy_(0, row_map, by_token), None, grad_probs


def grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """See ``contract.GroupedMatmul``: one matmul per expert, written straight into its rows of the output."""
    out: Tensor = GroupedMatmulFunction.apply(x, w, tokens_per_expert.tolist(), _mm_into)
    return out


class GroupedMatmulFunction(torch.autograd.Function):
    """x [T, K], w [E, K, N], rows of each expert; ``mm_into(a, b, out)`` makes every product.

    With ``add_mm(a, b, sums)`` the weight gradients are added to w's ``main_grad`` where it has one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        counts: list[int],
        mm_into: Callable[..., None],
        add_mm: Callable[..., None] | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.counts, ctx.mm_into, ctx.add_mm = counts, mm_into, add_mm
        out = x.new_empty(x.shape[0], w.shape[2])
        for x_e, w_e, out_e in zip(x.split(counts), w, out.split(counts), strict=True):
            mm_into(x_e, w_e, out_e)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        grads = grad.split(ctx.counts)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            for grad_e, w_e, out_e in zip(grads, w, grad_x.split(ctx.counts), strict=True):
                ctx.mm_into(grad_e, w_e.t(), out_e)
        if ctx.needs_input_grad[1]:
            grad_w = torch.empty_like(w)
            sums = None if ctx.add_mm is None else getattr(w, "main_grad", None)
            assert sums is None or sums.untyped_storage().nbytes(), "backward while the gradients are offloaded"
            into, outs = (ctx.mm_into, grad_w) if sums is None else (ctx.add_mm, sums)
            for grad_e, x_e, out_e in zip(grads, x.split(ctx.counts), outs, strict=True):
                into(x_e.t(), grad_e, out_e)
            if sums is not None:
                w.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return grad_x, grad_w, None, None, None


def _mm_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)
