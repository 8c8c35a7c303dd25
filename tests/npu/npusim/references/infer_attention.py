"""Rollout attention, after "torch_npu.npu_fused_infer_attention_score" of the Ascend documentation.

``softmax((q k^T + q_rope k_rope^T) scale) v`` of each sequence, keys and values packed, in a rectangle, or in pages
that ``block_table`` names. Simplified: float64 inside; no quantisation, shared prefix, pse or padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.attention_layout import check_ends, hidden_positions, masked_scores, repeat_heads, sequences
from npusim.references.checks import cann_version, require

OP = "npu_fused_infer_attention_score"
NO_LIMIT = 2147483647
PAGE_STEP, MAX_PAGE = 16, 512
DEEPSEEK = (512, 64)  # channels of query and query_rope
ROPE_HEADS, ROPE_HEADS_BEFORE_8_3 = (1, 2, 4, 8, 16, 32, 64, 128), (32, 64, 128)
NZ_WIDTH = 16  # channels side by side in the private layout NZ of 16-bit numbers


@reference("npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **not_simulated: Any,
) -> tuple[Tensor, Tensor | None]:
    """-> (attention like query, log-sum-exp [.., N, S, 1] float32 when asked for).

    Packed (TND) queries end at ``actual_seq_lengths``; packed keys at ``actual_seq_lengths_kv``, which for pages and
    rectangles are each sequence's own length.
    """
    unused = {name: value for name, value in not_simulated.items() if not (value is None or value == 0)}
    require(not unused, OP, f"{sorted(unused)} are not simulated")
    require(query.dtype in (torch.float16, torch.bfloat16), OP, f"wants float16 or bfloat16, got {query.dtype}")
    require(key.dtype == value.dtype == query.dtype, OP, "wants one dtype")
    require(query.numel() > 0, OP, "wants tensors that are not empty")
    num_kv_heads = num_key_value_heads or num_heads
    require(num_heads % num_kv_heads == 0, OP, f"{num_heads} heads over {num_kv_heads}")
    require((query_rope is None) == (key_rope is None), OP, "query_rope and key_rope come together")
    ends = check_ends(OP, actual_seq_lengths, len(query)) if input_layout == "TND" else None
    queries = sequences(query, input_layout, num_heads, ends)
    layout = (input_layout, num_kv_heads, actual_seq_lengths_kv, block_table, block_size, len(queries))
    keys, values = _keys(key, *layout), _keys(value, *layout)
    if query_rope is not None and key_rope is not None:
        rope = sequences(query_rope, input_layout, num_heads, ends)
        channels = (queries[0].shape[-1], rope[0].shape[-1])
        require(channels == DEEPSEEK and num_kv_heads == 1, OP, f"query_rope wants {DEEPSEEK} channels, one key head")
        heads = ROPE_HEADS_BEFORE_8_3 if cann_version() < (8, 3) else ROPE_HEADS
        require(num_heads in heads, OP, f"query_rope wants one of {heads} heads, got {num_heads}")
        queries = [torch.cat(pair, -1) for pair in zip(queries, rope, strict=True)]
        keys = [torch.cat(pair, -1) for pair in zip(keys, _keys(key_rope, *layout), strict=True)]
    out = torch.zeros_like(query)
    log_sums = torch.zeros(_statistics_shape(query, input_layout, num_heads, queries))
    out_views = sequences(out, input_layout, num_heads, ends)
    log_views = sequences(log_sums, "TND" if input_layout == "TND" else "BNSD", num_heads, ends)
    for index, (q_NSD, k_NSD, v_NSD) in enumerate(zip(queries, keys, values, strict=True)):
        num_queries, num_keys = q_NSD.shape[1], k_NSD.shape[1]
        if not (num_queries and num_keys):
            continue
        hidden = hidden_positions(OP, atten_mask, sparse_mode, index, num_queries, num_keys, pre_tokens, next_tokens)
        scores = masked_scores(OP, q_NSD, k_NSD, scale, hidden, wants_sight=False)
        out_views[index].copy_((scores.softmax(-1) @ repeat_heads(v_NSD, num_heads).double()).nan_to_num())
        log_views[index].copy_(scores.logsumexp(-1, keepdim=True))
    return out, log_sums if softmax_lse_flag else None


def _keys(
    x: Tensor,
    layout: str,
    num_heads: int,
    lengths: list[int] | None,
    block_table: Tensor | None,
    block_size: int,
    num_sequences: int,
) -> list[Tensor]:
    """[N, S, D] of each sequence."""
    if block_table is None:
        if layout == "TND":
            return sequences(x, layout, num_heads, check_ends(OP, lengths, len(x)))
        rows = sequences(x, layout, num_heads, None)
        return (
            rows if lengths is None else [row[:, :size] for row, size in zip(rows, _spread(lengths, rows), strict=True)]
        )
    require(lengths is not None and len(lengths) == num_sequences, OP, "pages need each sequence's length")
    require(block_table.dtype == torch.int32 and block_table.dim() == 2, OP, "block_table is int32 [B, blocks]")
    is_page_size = block_size % PAGE_STEP == 0 and PAGE_STEP <= block_size <= MAX_PAGE
    require(is_page_size, OP, f"block_size {block_size} is no multiple of {PAGE_STEP} up to {MAX_PAGE}")
    require(x.dim() != 5 or layout != "BNSD", OP, "NZ pages want queries as BSND, BSH or TND")
    pages = _pages(x, num_heads, block_size)
    assert lengths is not None
    require(max(lengths) <= block_table.shape[1] * block_size, OP, "the block table is too short")
    rows = []
    for length, blocks in zip(lengths, block_table.long(), strict=True):
        used = blocks[: -(-length // block_size)]
        require(bool(((used >= 0) & (used < len(pages))).all()), OP, "the block table names a page that is not there")
        rows.append(pages[used].transpose(0, 1).flatten(1, 2)[:, :length])
    return rows


def _pages(x: Tensor, num_heads: int, block_size: int) -> Tensor:
    """[pages, N, block_size, D] this, from [pages, block_size, N D], or from NZ: [pages, N, D/16, block_size, 16]."""
    if x.dim() == 3:
        x = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    elif x.dim() == 5:
        require(x.shape[-1] == NZ_WIDTH, OP, f"NZ pages end in {NZ_WIDTH}")
        x = x.transpose(2, 3).flatten(-2)
    require(x.dim() == 4 and x.shape[1] == num_heads and x.shape[2] == block_size, OP, f"pages of {tuple(x.shape)}")
    return x


def _spread(lengths: list[int], rows: list[Tensor]) -> list[int]:
    return lengths * len(rows) if len(lengths) == 1 else lengths


def _statistics_shape(query: Tensor, layout: str, num_heads: int, queries: list[Tensor]) -> tuple[int, ...]:
    return (len(query), num_heads, 1) if layout == "TND" else (len(queries), num_heads, queries[0].shape[1], 1)
