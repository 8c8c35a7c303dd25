"""Exact mode's op table for training: on a CPU, log-probabilities equal those of ``rollout_ops`` bit for bit.

Forward follows math.py, so a token's bits do not depend on packing or micro-batches. Backward is the gradient of
the reference ops at the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.ops import reference
from megatron.core.ops.contract import RouterRule, TrainOps
from megatron.core.ops.cpu import cpu_ops
from megatron.core.ops.cpu.attention import core_attention as cpu_attention
from megatron.core.ops.reference_moe import GroupedMatmulFunction
from megatron.core.ops.reference_moe import token_unpermute as reference_token_unpermute
from megatron.core.ops.reference_moe import topk_router as reference_topk_router
from verl.exact_mode import math as exact_math
from verl.exact_mode.math import KEYS, QUERIES

_MAX_RECTANGLE = 1 << 24  # query elements that are copied at a time: 64 MiB


def exact_ops() -> TrainOps:
    """Return the exact table. Attention in blocks (context parallelism) has no exact form and stays the reference."""
    table = cpu_ops()
    entries: dict[str, Any] = {
        "rms_norm": rms_norm,
        "swiglu": swiglu,
        "rotary_interleaved": rotary_interleaved,
        "core_attention": core_attention,
        "shared_prompt_attention": None,  # core_attention, with whole sequences
        "matmul": exact_math.matmul,
        "grouped_matmul": grouped_matmul,
        "token_unpermute": token_unpermute,
        "topk_router": topk_router,
        "log_sum_exp": reference.log_sum_exp,
    }
    return replace(table, **entries, names=table.names | dict.fromkeys(entries, "exact"))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _differentiable(
        lambda x, weight: exact_math.rms_norm(x, weight, eps),
        lambda x, weight: reference.rms_norm(x, weight, eps),
        x,
        weight,
    )


def swiglu(x: Tensor) -> Tensor:
    return _differentiable(exact_math.swiglu, reference.swiglu, x)


def rotary_interleaved(x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``contract.RotaryInterleaved``; the first members of all pairs, then the second ones, as in rollout."""

    def in_halves(x: Tensor) -> Tensor:
        return reference.rotary_interleaved(x, cos, sin).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    return _differentiable(lambda x: exact_math.rotary(x, cos, sin), in_halves, x_TNR)


def core_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
) -> Tensor:
    return _differentiable(
        lambda q, k, v: _attention(q, k, v, cu_seqlens, scale, causal),
        lambda q, k, v: cpu_attention(q, k, v, cu_seqlens, max_seqlen, scale, causal),
        q,
        k,
        v,
    )


def grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    out: Tensor = GroupedMatmulFunction.apply(x, w, tokens_per_expert.tolist(), _matmul_into)
    return out


def token_unpermute(rows: Tensor, row_map: Tensor, probs_TK: Tensor | None = None, topk: int = 1) -> Tensor:
    if probs_TK is None:
        return reference_token_unpermute(rows, row_map, None, topk)
    shape = (*probs_TK.shape, rows.shape[-1])
    return _differentiable(
        lambda rows, probs: exact_math.weighted_rows(rows.index_select(0, row_map).view(shape), probs),
        lambda rows, probs: reference_token_unpermute(rows, row_map, probs),
        rows,
        probs_TK,
    )


def topk_router(
    logits_TE: Tensor, rule: RouterRule, expert_bias: Tensor | None = None, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``contract.TopkRouter``; choices in ascending order."""
    is_sigmoid = rule.score_function == "sigmoid"

    def scores(logits_TE: Tensor) -> Tensor:
        if is_sigmoid:
            return exact_math.sigmoid(logits_TE)
        return exact_math.softmax(logits_TE) if rule.pre_softmax else logits_TE

    if chosen_TK is None:
        groups = (rule.num_groups or 1, rule.group_topk or 1, 2 if is_sigmoid else 1)
        with torch.no_grad():
            chosen_TK = exact_math.choose_experts(scores(logits_TE), expert_bias, rule.topk, *groups)
    indices_TK = chosen_TK

    def weights(logits_TE: Tensor) -> Tensor:
        probs_TK = scores(logits_TE).gather(1, indices_TK)
        if is_sigmoid and rule.norm_topk_prob and rule.topk > 1:
            probs_TK = probs_TK / (exact_math.in_order(probs_TK) + 1e-20)
        elif not is_sigmoid and not rule.pre_softmax:
            probs_TK = exact_math.softmax(probs_TK)
        return probs_TK if rule.scaling_factor is None else probs_TK * rule.scaling_factor

    def reference_weights(logits_TE: Tensor) -> Tensor:
        return reference_topk_router(logits_TE, rule, chosen_TK=indices_TK)[0]

    return _differentiable(weights, reference_weights, logits_TE), indices_TK


def _differentiable(exact: Callable[..., Tensor], differentiable: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``exact(*inputs)`` with the gradient of ``differentiable``."""
    out: Tensor = _GradientOfAnother.apply(exact, differentiable, *inputs)
    return out


class _GradientOfAnother(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., Tensor], differentiable: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.differentiable = differentiable
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                x.detach().requires_grad_(is_needed) for x, is_needed in zip(ctx.saved_tensors, needed, strict=True)
            ]
            grads = torch.autograd.grad(ctx.differentiable(*inputs), [x for x in inputs if x.requires_grad], grad)
        remaining = iter(grads)
        return None, None, *(next(remaining) if is_needed else None for is_needed in needed)


def _matmul_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    out.copy_(exact_math.matmul(a, b))


def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool) -> Tensor:
    """Return [T, N, Dv]; sequences with the same number of key blocks are computed together."""
    heads = q.shape[1]
    k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    bounds = cu_seqlens.cpu().numpy().astype(np.int64)
    starts, lengths = bounds[:-1], np.diff(bounds)
    num_blocks = -(-lengths // KEYS)
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    for count in np.unique(num_blocks[lengths > 0]):
        same = np.flatnonzero(num_blocks == count)
        at_once = max(1, _MAX_RECTANGLE // (int(count) * KEYS * q[0].numel()))
        for first in range(0, len(same), at_once):
            rows = same[first : first + at_once]
            _attend(q, k, v, starts[rows, None], lengths[rows, None], scale, causal, out)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, starts: np.ndarray, lengths: np.ndarray, scale: float, causal: bool, out: Tensor
) -> None:
    """Write the outputs of b sequences, ``starts`` and ``lengths`` [b, 1]; padding repeats a sequence's last token."""
    longest = int(lengths.max())

    def tokens(block: int) -> tuple[np.ndarray, np.ndarray]:
        offsets = np.arange(-(-longest // block) * block)
        return offsets < lengths, np.minimum(offsets, lengths - 1)

    (is_real, query), (_, key) = tokens(QUERIES), tokens(KEYS)
    last = query if causal else np.repeat(lengths - 1, query.shape[1], axis=1)
    queries, real, last_bQ, keys = (torch.from_numpy(x) for x in (starts + query, is_real, last, starts + key))
    exact_math.attend_into(out, q, queries, real, last_bQ, k[keys], v[keys], scale)
