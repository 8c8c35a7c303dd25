"""Training attention, after "torch_npu.npu_fusion_attention" and "aclnnFlashAttentionVarLenScore" of the Ascend
documentation.

``softmax(q k^T scale, hidden positions left out) v`` of each sequence and head; Nq / Nkv query heads share a key head.
Simplified: float64 inside, one rounding at the end; no pse, dropout, prefix or sink. Packed sequences (TND) want one
head size for q, k and v up to CANN 8.2, whose page says so; later ones take a smaller v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.attention_layout import (
    CAUSAL_FROM_THE_END,
    check_ends,
    hidden_positions,
    masked_scores,
    repeat_heads,
    sequences,
)
from npusim.references.checks import cann_version, require, require_floats

STATISTICS_WIDTH = 8  # the kernel stores each row's maximum and sum eight times
MAX_HEADS, MAX_HEAD_SIZE = 256, 768
TAKES_NARROW_VALUES = (8, 3)  # version of CANN; MindSpeed advises 8.2.RC1 or newer
NO_LIMIT = 2147483647


@dataclass
class _Call:
    """What the forward and the backward op read alike."""

    op: str
    layout: str
    num_heads: int
    num_kv_heads: int
    ends: list[int] | None
    kv_ends: list[int] | None
    mask: Tensor | None
    sparse_mode: int
    before: int
    after: int
    scale: float

    def queries(self, x: Tensor) -> list[Tensor]:
        return sequences(x, self.layout, self.num_heads, self.ends)

    def keys(self, x: Tensor) -> list[Tensor]:
        return sequences(x, self.layout, self.num_kv_heads, self.kv_ends)

    def statistics(self, x: Tensor) -> list[Tensor]:
        """Views [N, S, 8] of a statistic, [T, N, 8] or [B, N, S, 8]."""
        return sequences(x, "TND" if self.layout == "TND" else "BNSD", self.num_heads, self.ends)

    def scores(self, index: int, q_NSD: Tensor, k_NSD: Tensor) -> Tensor:
        num_queries, num_keys = q_NSD.shape[1], k_NSD.shape[1]
        if self.sparse_mode == CAUSAL_FROM_THE_END:
            require(num_queries <= num_keys, self.op, f"sparse_mode 3 with {num_queries} queries of {num_keys} keys")
        hidden = hidden_positions(
            self.op, self.mask, self.sparse_mode, index, num_queries, num_keys, self.before, self.after
        )
        return masked_scores(self.op, q_NSD, k_NSD, self.scale, hidden, wants_sight=True)


@reference("npu_fusion_attention")
def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Any, ...]:
    """-> (attention like query, maximum and sum of each row of scores in float32, and four outputs left alone)."""
    op = "npu_fusion_attention"
    not_simulated = (pse, padding_mask, prefix, sink, dropout_mask)
    require(all(x is None for x in not_simulated) and keep_prob == 1 and not softmax_layout, op, "not simulated")
    lengths = (actual_seq_qlen, actual_seq_kvlen)
    call = _call(
        op,
        query,
        key,
        value,
        head_num,
        input_layout,
        lengths,
        atten_mask,
        sparse_mode,
        pre_tockens,
        next_tockens,
        scale,
    )
    value_size = value.shape[-1] // (call.num_kv_heads if input_layout in ("BSH", "SBH") else 1)
    width = value_size * (head_num if input_layout in ("BSH", "SBH") else 1)
    out = query.new_empty(*query.shape[:-1], width)
    maximum, total = _new_statistics(call, query), _new_statistics(call, query)
    outputs = zip(call.queries(out), call.statistics(maximum), call.statistics(total), strict=True)
    inputs = zip(call.queries(query), call.keys(key), call.keys(value), strict=True)
    for index, ((q_NSD, k_NSD, v_NSD), (out_NSD, max_NS8, sum_NS8)) in enumerate(zip(inputs, outputs, strict=True)):
        if not q_NSD.shape[1]:
            continue
        scores = call.scores(index, q_NSD, k_NSD)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp()
        out_NSD.copy_(weights @ repeat_heads(v_NSD, head_num).double() / weights.sum(-1, keepdim=True))
        max_NS8.copy_(top)
        sum_NS8.copy_(weights.sum(-1, keepdim=True))
    return out, maximum, total, None, None, None, None


@reference("npu_fusion_attention_grad")
def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_in: Tensor | None = None,
    attention_in: Tensor,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Any, ...]:
    """Gradients of q, k and v, from the statistics and the output that the forward op returned."""
    op = "npu_fusion_attention_grad"
    not_simulated = (pse, padding_mask, prefix, sink)
    require(all(x is None for x in not_simulated) and keep_prob == 1 and not softmax_layout, op, "not simulated")
    lengths = (actual_seq_qlen, actual_seq_kvlen)
    call = _call(
        op,
        query,
        key,
        value,
        head_num,
        input_layout,
        lengths,
        atten_mask,
        sparse_mode,
        pre_tockens,
        next_tockens,
        scale_value,
    )
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (query, key, value))
    inputs = (call.queries(query), call.keys(key), call.keys(value), call.queries(dy), call.queries(attention_in))
    results = (call.queries(grad_q), call.keys(grad_k), call.keys(grad_v))
    statistics = (call.statistics(softmax_max), call.statistics(softmax_sum))
    for index, views in enumerate(zip(*inputs, *statistics, *results, strict=True)):
        q_NSD, k_NSD, v_NSD, dy_NSD, out_NSD = (x.double() for x in views[:5])
        max_NS1, sum_NS1 = (x[..., :1].double() for x in views[5:7])
        weights = (call.scores(index, views[0], views[1]) - max_NS1).exp() / sum_NS1
        grad_weights = dy_NSD @ repeat_heads(v_NSD, head_num).transpose(1, 2)
        grad_scores = weights * (grad_weights - (dy_NSD * out_NSD).sum(-1, keepdim=True)) * scale_value
        views[7].copy_(grad_scores @ repeat_heads(k_NSD, head_num))
        views[8].copy_(_add_shared(grad_scores.transpose(1, 2) @ q_NSD, call.num_kv_heads))
        views[9].copy_(_add_shared(weights.transpose(1, 2) @ dy_NSD, call.num_kv_heads))
    return grad_q, grad_k, grad_v, None, None


def _call(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    layout: str,
    lengths: tuple[list[int] | None, list[int] | None],
    mask: Tensor | None,
    sparse_mode: int,
    before: int,
    after: int,
    scale: float,
) -> _Call:
    """Checks the limits that the documentation names."""
    require_floats(op, query, key, value)
    require(min(x.numel() for x in (query, key, value)) > 0, op, "wants tensors that are not empty")
    if layout in ("BSH", "SBH"):
        head_size = query.shape[-1] // num_heads
        num_kv_heads = key.shape[-1] // head_size
    else:
        axis = 1 if layout in ("TND", "BNSD") else 2
        head_size, num_kv_heads = query.shape[-1], key.shape[axis]
        require(query.shape[axis] == num_heads, op, f"head_num {num_heads} of a query with {query.shape[axis]}")
        require(key.shape[-1] == head_size, op, "wants one head size for q and k")
        wants_one_size = layout == "TND" and cann_version() < TAKES_NARROW_VALUES
        is_v_right = value.shape[-1] == head_size if wants_one_size else value.shape[-1] <= head_size
        require(is_v_right, op, f"v's head size {value.shape[-1]} beside q's {head_size} in layout {layout}")
    require(num_heads % num_kv_heads == 0 and num_heads <= MAX_HEADS, op, f"{num_heads} heads over {num_kv_heads}")
    require(head_size <= MAX_HEAD_SIZE, op, f"head size {head_size} is over {MAX_HEAD_SIZE}")
    require(mask is None or mask.dtype in (torch.bool, torch.uint8), op, "the mask is bool or uint8")
    ends, kv_ends = lengths
    if layout == "TND":
        ends, kv_ends = check_ends(op, ends, len(query)), check_ends(op, kv_ends, len(key))
        require(len(ends) == len(kv_ends), op, f"{len(ends)} query sequences and {len(kv_ends)} key sequences")
    return _Call(op, layout, num_heads, num_kv_heads, ends, kv_ends, mask, sparse_mode, before, after, scale)


def _new_statistics(call: _Call, query: Tensor) -> Tensor:
    if call.layout == "TND":
        return torch.zeros(len(query), call.num_heads, STATISTICS_WIDTH)
    views = call.queries(query)
    return torch.zeros(len(views), call.num_heads, views[0].shape[1], STATISTICS_WIDTH)


def _add_shared(per_query_head: Tensor, num_kv_heads: int) -> Tensor:
    """Sum of the gradients of the query heads that share a key head."""
    return per_query_head.unflatten(0, (num_kv_heads, -1)).sum(1)
