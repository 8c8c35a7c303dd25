"""Causal attention of packed new tokens over their sequences' contexts, paged or packed.

One program has TILE_Q new tokens of one sequence and one query head. A head's channels are D, and R more that all key
heads share; values have V. Sums are float32, exponents base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm.ops.cuda.kernels.arithmetic import LOG2_E, attend, dot, rounded


@triton.jit(do_not_specialize=["table_stride"])
def prefill_attention(
    q: tl.tensor,  # [T, N, D]
    q_stride_T: tl.tensor,
    q_stride_N: tl.tensor,
    q_rope: tl.tensor,  # [T, N, R]
    rope_stride_T: tl.tensor,
    rope_stride_N: tl.tensor,
    keys: tl.tensor,  # [tokens, ...], of a head D contiguous channels
    k_stride_S: tl.tensor,
    k_stride_N: tl.tensor,
    k_rope: tl.tensor,  # [tokens, R]
    k_rope_stride_S: tl.tensor,
    values: tl.tensor,  # [tokens, ...], of a head V contiguous channels
    v_stride_S: tl.tensor,
    v_stride_N: tl.tensor,
    tables: tl.tensor,  # int32 [B, W]: paged tokens lie at block * BLOCK_SIZE + offset
    table_stride: tl.tensor,
    context_starts: tl.tensor,  # int32 [B]: those of a packed context lie one after another
    cu_query_lens: tl.tensor,  # int32 [B + 1]
    seq_lens: tl.tensor,  # int32 [B]
    out: tl.tensor,  # [T, N, V] contiguous
    num_heads: tl.tensor,
    heads_of_group: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # 0: the context is packed
    TILE_Q: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_V: tl.constexpr,
) -> None:
    head, row = tl.program_id(1), tl.program_id(2)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the longest contexts start first
    first_query = tl.load(cu_query_lens + row)
    num_queries = tl.load(cu_query_lens + row + 1) - first_query
    if tile * TILE_Q >= num_queries:
        return
    length = tl.load(seq_lens + row)
    query, group = tile * TILE_Q + tl.arange(0, TILE_Q), head // heads_of_group
    is_query, position = query < num_queries, length - num_queries + query
    d, r, v = tl.arange(0, TILE_D), tl.arange(0, TILE_R), tl.arange(0, TILE_V)
    token_of_step = (first_query + query).to(tl.int64)[:, None]
    q_at = q + token_of_step * q_stride_T + head * q_stride_N + d[None, :]
    q_QD = tl.load(q_at, mask=is_query[:, None] & (d[None, :] < D), other=0.0)
    if R > 0:
        rope_at = q_rope + token_of_step * rope_stride_T + head * rope_stride_N + r[None, :]
        q_QR = tl.load(rope_at, mask=is_query[:, None] & (r[None, :] < R), other=0.0)

    peak_Q = tl.full([TILE_Q], float("-inf"), tl.float32)
    sum_Q = tl.zeros([TILE_Q], tl.float32)
    out_QV = tl.zeros([TILE_Q, TILE_V], tl.float32)
    stop = tl.minimum(length, length - num_queries + (tile + 1) * TILE_Q)
    for first in range(0, stop, TILE_S):
        token = first + tl.arange(0, TILE_S)
        is_token = token < stop
        if BLOCK_SIZE > 0:
            block = tl.load(tables + row * table_stride + token // BLOCK_SIZE, mask=is_token, other=0)
            place = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE)[:, None]
        else:
            place = (tl.load(context_starts + row) + token).to(tl.int64)[:, None]
        keys_at = keys + place * k_stride_S + group * k_stride_N + d[None, :]
        k_SD = tl.load(keys_at, mask=is_token[:, None] & (d[None, :] < D), other=0.0)
        scores_QS = dot(q_QD, tl.trans(k_SD), tl.zeros([TILE_Q, TILE_S], tl.float32))
        if R > 0:
            k_rope_at = k_rope + place * k_rope_stride_S + r[None, :]
            k_SR = tl.load(k_rope_at, mask=is_token[:, None] & (r[None, :] < R), other=0.0)
            scores_QS = dot(q_QR, tl.trans(k_SR), scores_QS)
        is_seen = (token[None, :] <= position[:, None]) & is_token[None, :]
        scores_QS = tl.where(is_seen, scores_QS * (scale * LOG2_E), float("-inf"))
        values_at = values + place * v_stride_S + group * v_stride_N + v[None, :]
        v_SV = tl.load(values_at, mask=is_token[:, None] & (v[None, :] < V), other=0.0)
        peak_Q, sum_Q, out_QV = attend(scores_QS, v_SV, peak_Q, sum_Q, out_QV)

    out_at = out + (token_of_step * num_heads + head) * V + v[None, :]
    out_QV = out_QV / sum_Q[:, None]
    tl.store(out_at, rounded(out_QV, out.dtype.element_ty), mask=is_query[:, None] & (v[None, :] < V))
