"""The choice of experts, and the sum of what they return."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm.ops.cuda.kernels.arithmetic import rounded


@triton.jit
def topk_router(
    logits: tl.tensor,  # fp32 [T, E], contiguous
    bias: tl.tensor,  # fp32 [E]
    weights: tl.tensor,  # fp32 [T, K], contiguous
    ids: tl.tensor,  # int64 [T, K], contiguous
    scaling: tl.tensor,
    IS_SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZES: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    E: tl.constexpr,  # of a group
    TILE_K: tl.constexpr,
    TILE_G: tl.constexpr,
    TILE_E: tl.constexpr,
) -> None:
    row, g, e, k = tl.program_id(0).to(tl.int64), tl.arange(0, TILE_G), tl.arange(0, TILE_E), tl.arange(0, TILE_K)
    expert_GE, nothing = g[:, None] * E + e[None, :], float("-inf")
    is_expert = (g[:, None] < GROUPS) & (e[None, :] < E)
    scores_GE = tl.load(logits + row * (GROUPS * E) + expert_GE, mask=is_expert, other=nothing)
    if IS_SOFTMAX:
        scores_GE = tl.exp(scores_GE - tl.max(tl.max(scores_GE, 1), 0))
        scores_GE = scores_GE / tl.sum(tl.sum(scores_GE, 1), 0)
    else:
        scores_GE = 1.0 / (1.0 + tl.exp(-scores_GE))
    choice_GE = scores_GE
    if HAS_BIAS:
        choice_GE = choice_GE + tl.load(bias + expert_GE, mask=is_expert, other=0.0)
    choice_GE = tl.where(is_expert, choice_GE, nothing)
    if KEPT_GROUPS < GROUPS:
        group_G = tl.max(choice_GE, 1)
        if not IS_SOFTMAX and E > 1:
            is_best = e[None, :] == tl.argmax(choice_GE, 1)[:, None]
            group_G = group_G + tl.max(tl.where(is_best, nothing, choice_GE), 1)
        group_G = tl.where(g < GROUPS, group_G, nothing)
        is_kept_G = g < 0
        for _ in tl.static_range(KEPT_GROUPS):
            is_next_G = g == tl.argmax(tl.where(is_kept_G, nothing, group_G), 0)
            is_kept_G = is_kept_G | is_next_G
        choice_GE = tl.where(is_kept_G[:, None], choice_GE, nothing)

    weights_K = tl.zeros([TILE_K], tl.float32)
    ids_K = tl.zeros([TILE_K], tl.int32)
    for i in tl.static_range(K):
        best = tl.max(tl.max(choice_GE, 1), 0)
        chosen = tl.min(tl.min(tl.where(choice_GE == best, expert_GE, GROUPS * E), 1), 0)
        is_chosen = expert_GE == chosen
        weight = tl.sum(tl.sum(tl.where(is_chosen & is_expert, scores_GE, 0.0), 1), 0)
        weights_K, ids_K = tl.where(k == i, weight, weights_K), tl.where(k == i, chosen, ids_K)
        choice_GE = tl.where(is_chosen, nothing, choice_GE)
    if NORMALIZES:
        weights_K = weights_K / (tl.sum(weights_K, 0) + 1e-20)
    tl.store(weights + row * K + k, weights_K * scaling, mask=k < K)
    tl.store(ids + row * K + k, ids_K.to(tl.int64), mask=k < K)


@triton.jit
def sum_of_experts(
    products: tl.tensor,  # [T * K, H], contiguous
    places: tl.tensor,  # int64 [T, K]: the row of products that a choice has; past num_rows: none
    num_rows: tl.tensor,  # int32, one number on the device
    weights: tl.tensor,  # [T, K], contiguous
    out: tl.tensor,  # [T, H], contiguous
    K: tl.constexpr,
    H: tl.constexpr,
    TILE_H: tl.constexpr,
) -> None:
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    end, sum_H = tl.load(num_rows), tl.zeros([TILE_H], tl.float32)
    for i in tl.static_range(K):
        place = tl.load(places + row * K + i)
        product_at = products + place * H + h
        # Rows past the last expert's are unwritten: what lies there may be no number.
        product_H = tl.load(product_at, mask=(h < H) & (place < end), other=0.0).to(tl.float32)
        sum_H += tl.load(weights + row * K + i).to(tl.float32) * product_H
    tl.store(out + row * H + h, rounded(sum_H, out.dtype.element_ty), mask=h < H)
