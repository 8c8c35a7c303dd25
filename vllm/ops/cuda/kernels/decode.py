"""Attention of one new token of each sequence over its pages, in splits, and the merge of the splits.

A query head's channels are D, and R more that only keys have (positions of the latent form); values are the keys' first
D channels or D of their own. A group is the M query heads that read one head of keys and values. One program has up to
TILE_H heads of one group, which share what it loads, and one split of one context: whole tiles of TILE_S tokens. Sums
are float32, exponents base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm.ops.cuda.kernels.arithmetic import LOG2_E, attend, dot, rounded


# Widths of tables change from step to step: no variant of the kernel for some of them.
@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def decode_attention(
    q: tl.tensor,  # [B, N, D]
    q_stride_B: tl.tensor,
    q_stride_N: tl.tensor,
    q_rope: tl.tensor,  # [B, N, R]
    rope_stride_B: tl.tensor,
    rope_stride_N: tl.tensor,
    pages: tl.tensor,  # [num_blocks, BLOCK_SIZE, ...], contiguous
    tables: tl.tensor,  # int32 [B, W]
    table_stride: tl.tensor,
    seq_lens: tl.tensor,  # int32 [B]
    out: tl.tensor,  # [B, N, splits, D] contiguous, fp32 if it IS_SPLIT
    log_sums: tl.tensor,  # fp32 [B, N, splits], base 2; written if it IS_SPLIT
    num_splits: tl.tensor,
    scale: tl.tensor,
    IS_SPLIT: tl.constexpr,
    GROUPS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,  # channels of a token in the pages
    VALUE_OFFSET: tl.constexpr,  # from a head's keys to its values; 0: the keys are the values
    BLOCK_SIZE: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_R: tl.constexpr,
) -> None:
    TILES: tl.constexpr = (M + TILE_H - 1) // TILE_H
    program = tl.program_id(0)
    tile, group = program % TILES, program // TILES % GROUPS
    split, row = program // (TILES * GROUPS) % num_splits, (program // (TILES * GROUPS) // num_splits).to(tl.int64)
    head_of_group = tile * TILE_H + tl.arange(0, TILE_H)
    is_head = head_of_group < M
    head, d, r = group * M + head_of_group, tl.arange(0, TILE_D), tl.arange(0, TILE_R)
    q_at = q + row * q_stride_B + head[:, None] * q_stride_N + d[None, :]
    q_HD = tl.load(q_at, mask=is_head[:, None] & (d[None, :] < D), other=0.0)
    if R > 0:
        rope_at = q_rope + row * rope_stride_B + head[:, None] * rope_stride_N + r[None, :]
        q_HR = tl.load(rope_at, mask=is_head[:, None] & (r[None, :] < R), other=0.0)

    length = tl.load(seq_lens + row)
    tokens_of_split = tl.cdiv(tl.cdiv(length, TILE_S), num_splits) * TILE_S
    start = split * tokens_of_split
    stop = tl.minimum(start + tokens_of_split, length)
    peak_H = tl.full([TILE_H], float("-inf"), tl.float32)
    sum_H = tl.zeros([TILE_H], tl.float32)
    out_HD = tl.zeros([TILE_H, TILE_D], tl.float32)
    for first in range(start, stop, TILE_S):
        token = first + tl.arange(0, TILE_S)
        is_token = token < stop
        block = tl.load(tables + row * table_stride + token // BLOCK_SIZE, mask=is_token, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        keys_at = pages + slot[:, None] * TOKEN_STRIDE + group * D
        is_channel = is_token[:, None] & (d[None, :] < D)
        k_SD = tl.load(keys_at + d[None, :], mask=is_channel, other=0.0)
        scores_HS = dot(q_HD, tl.trans(k_SD), tl.zeros([TILE_H, TILE_S], tl.float32))
        if R > 0:
            k_SR = tl.load(keys_at + D + r[None, :], mask=is_token[:, None] & (r[None, :] < R), other=0.0)
            scores_HS = dot(q_HR, tl.trans(k_SR), scores_HS)
        scores_HS = tl.where(is_token[None, :], scores_HS * (scale * LOG2_E), float("-inf"))
        if VALUE_OFFSET > 0:
            v_SD = tl.load(keys_at + VALUE_OFFSET + d[None, :], mask=is_channel, other=0.0)
        else:
            v_SD = k_SD
        peak_H, sum_H, out_HD = attend(scores_HS, v_SD, peak_H, sum_H, out_HD)

    out_HD = out_HD / tl.where(sum_H > 0, sum_H, 1.0)[:, None]  # a split may be empty
    part = (row * (GROUPS * M) + head) * num_splits + split
    out_at = out + part[:, None] * D + d[None, :]
    tl.store(out_at, rounded(out_HD, out.dtype.element_ty), mask=is_head[:, None] & (d[None, :] < D))
    if IS_SPLIT:
        tl.store(log_sums + part, peak_H + tl.log2(sum_H), mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    parts: tl.tensor,  # fp32 [rows, splits, D]
    log_sums: tl.tensor,  # fp32 [rows, splits], -inf for an empty split
    out: tl.tensor,  # [rows, D]
    num_splits: tl.tensor,
    D: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    row, split, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE_SPLITS), tl.arange(0, TILE_D)
    logs = tl.load(log_sums + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    peak = tl.max(logs, 0)
    total = tl.sum(tl.exp2(logs - peak), 0)
    sum_D = tl.zeros([TILE_D], tl.float32)
    for i in range(num_splits):
        part = row * num_splits + i
        weight = tl.exp2(tl.load(log_sums + part) - peak)
        sum_D += weight * tl.load(parts + part * D + d, mask=d < D, other=0.0)
    tl.store(out + row * D + d, rounded(sum_D / total, out.dtype.element_ty), mask=d < D)
