"""The choice of a token's experts, weighted sums of its rows, and what experts without rows need."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rows(
    rows: tl.tensor,
    row_map: tl.tensor,
    probs: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    TOPK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A part of out[t]: the sum of the rows that ``row_map[t * TOPK + k]`` names, by their weights if WEIGHTED."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in range(TOPK):
        row = tl.load(row_map + token * TOPK + choice).to(tl.int64)
        values = tl.load(rows + row * width + columns, mask=is_in, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(probs + token * TOPK + choice)
        total += values
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def add_rows_grad(
    grad: tl.tensor,
    rows: tl.tensor,
    row_map: tl.tensor,
    probs: tl.tensor,
    grad_rows: tl.tensor,
    grad_probs: tl.tensor,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One choice of one token: the gradient of its row, and if WEIGHTED of its weight."""
    choice = tl.program_id(0).to(tl.int64)
    token = choice // TOPK
    row = tl.load(row_map + choice).to(tl.int64)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_in = columns < WIDTH
        grad_out = tl.load(grad + token * WIDTH + columns, mask=is_in, other=0.0).to(tl.float32)
        if WEIGHTED:
            products += grad_out * tl.load(rows + row * WIDTH + columns, mask=is_in, other=0.0).to(tl.float32)
            grad_out *= tl.load(probs + choice)
        tl.store(grad_rows + row * WIDTH + columns, grad_out.to(grad_rows.dtype.element_ty), mask=is_in)
    if WEIGHTED:
        tl.store(grad_probs + choice, tl.sum(products, 0))


@triton.jit
def choose(
    logits: tl.tensor,
    bias: tl.tensor,
    chosen: tl.tensor,
    group_size: tl.tensor,
    num_groups: tl.tensor,
    GROUP_TOPK: tl.constexpr,
    TOPK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCORES: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """The experts of one token, the best first, as in ``contract.TopkRouter``.

    A row of experts is read as [GROUPS, SIZE], both rounded up to powers of two. SCORES: "logits", "sigmoid" or
    "softmax". BEST_OF_GROUP 0: there are no groups. Scores that are no numbers lose; what is chosen is always one of
    the experts, because the first place of all is no filler.
    """
    token = tl.program_id(0).to(tl.int64)
    num_experts = num_groups * group_size
    places = tl.arange(0, GROUPS * SIZE)
    group, slot = places // SIZE, places % SIZE
    is_in = (group < num_groups) & (slot < group_size)
    experts = group * group_size + slot
    scores = tl.load(logits + token * num_experts + experts, mask=is_in, other=float("-inf"))
    if SCORES == "sigmoid":
        scores = tl.sigmoid(scores)
    if SCORES == "softmax":
        weights = tl.exp(scores - tl.max(scores, 0))
        scores = weights / tl.sum(weights, 0)
    if HAS_BIAS:
        scores += tl.load(bias + experts, mask=is_in, other=0.0)
    scores = tl.where(is_in & (scores == scores), scores, float("-inf"))
    if BEST_OF_GROUP > 0:
        by_group = tl.reshape(scores, GROUPS, SIZE)
        group_scores = tl.max(by_group, 1)
        if BEST_OF_GROUP == 2:
            best_slots = tl.argmax(by_group, 1)
            others = tl.where(tl.arange(0, SIZE)[None, :] == best_slots[:, None], float("-inf"), by_group)
            group_scores += tl.max(others, 1)
        groups = tl.arange(0, GROUPS)
        wins = tl.zeros([GROUPS], dtype=tl.int32)
        for _ in range(GROUP_TOPK):
            winner = groups == tl.argmax(group_scores, 0)
            wins = tl.where(winner, 1, wins)
            group_scores = tl.where(winner, float("-inf"), group_scores)
        scores = tl.reshape(tl.where(wins[:, None] > 0, by_group, float("-inf")), GROUPS * SIZE)
    for choice in range(TOPK):
        best = tl.argmax(scores, 0)
        expert = best // SIZE * group_size + best % SIZE
        tl.store(chosen + token * TOPK + choice, expert.to(tl.int64))
        scores = tl.where(places == best, float("-inf"), scores)


@triton.jit
def add_products(sums: tl.tensor, products: tl.tensor, ends: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """sums[e] += products[e] for experts that have rows; ``ends`` int32 [E] says where each one's rows end."""
    expert = tl.program_id(0).to(tl.int64)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) > start:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_in = columns < size
        values = tl.load(products + expert * size + columns, mask=is_in, other=0.0).to(tl.float32)
        values += tl.load(sums + expert * size + columns, mask=is_in, other=0.0).to(tl.float32)
        tl.store(sums + expert * size + columns, values.to(sums.dtype.element_ty), mask=is_in)


@triton.jit
def clear_idle(products: tl.tensor, ends: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Products of experts without rows become zero; the others are not touched."""
    expert = tl.program_id(0).to(tl.int64)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) == start:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], dtype=products.dtype.element_ty)
        tl.store(products + expert * size + columns, zeros, mask=columns < size)
