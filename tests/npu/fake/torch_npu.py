"""Stands in for torch_npu where there is none: the ops we call, in plain torch, as CANN's documentation describes them.

Where the documentation leaves something open the stand-in does the worst: memory that a kernel need not write holds
NaN, and what a kernel does not take is an assertion. Signatures are torch_npu 2.5.1.post1's
(``tests/npu/test_static_contract.py``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NAN = float("nan")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert input.dtype == gamma.dtype
    rstd = torch.rsqrt(input.float().square().mean(-1, keepdim=True) + epsilon)
    return (input.float() * rstd * gamma.float()).to(input.dtype), rstd


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    assert rotary_mode == "interleave" and input.dim() == r1.dim() == r2.dim() == 4
    assert input.dtype == r1.dtype == r2.dtype and input.shape[-1] == r1.shape[-1] <= 896
    turned = torch.stack((-input[..., 1::2], input[..., 0::2]), dim=-1).flatten(-2)
    return input * r1 + turned * r2


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    assert x.dim() == 4 and x.shape[-1] == 64 and x.dtype in (torch.float16, torch.bfloat16) and x.dtype == cos.dtype
    apart = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    first, second = apart.chunk(2, dim=-1)
    return apart * cos + torch.cat((-second, first), dim=-1) * sin


def npu_fusion_attention(
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
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    if input_layout == "BNSD":
        assert query.shape[1] == head_num and head_num % key.shape[1] == 0 and atten_mask is not None
        scores = (query @ key.mT).mul(scale).masked_fill(atten_mask, float("-inf"))
        attended = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
        return attended, query, query, query, 0, 0, 0
    assert input_layout == "TND" and query.shape[1] == key.shape[1] == head_num
    assert query.shape[-1] == key.shape[-1] == value.shape[-1], "the packed kernel wants one head size"
    assert actual_seq_qlen is not None and actual_seq_kvlen is not None and actual_seq_qlen[-1] == len(query)
    if sparse_mode == 3:
        assert atten_mask is not None and atten_mask.shape == (2048, 2048) and atten_mask.dtype == torch.bool
        assert bool(atten_mask[0, 1]) and not bool(atten_mask[1, 0])
    else:
        assert sparse_mode == 0 and atten_mask is None
    out, q0, k0 = [], 0, 0
    for q1, k1 in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
        assert q1 > q0 and k1 > k0, "no empty sequence"
        scores = torch.einsum("qnd,knd->nqk", query[q0:q1].float(), key[k0:k1].float()) * scale
        if sparse_mode == 3:  # the last query sees the last key
            hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).triu(1 + (k1 - k0) - (q1 - q0))
            scores = scores.masked_fill(hidden, float("-inf"))
        out.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), value[k0:k1].float()))
        q0, k0 = q1, k1
    empty = query.new_empty(0)
    return torch.cat(out).to(query.dtype), empty, empty, empty, 0, 0, 0


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_lengths_kv: list[int],
    block_table: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    assert input_layout == "BNSD" and num_key_value_heads == 1 and query.shape[1] == num_heads and query.shape[2] == 1
    assert query.is_contiguous() and query_rope.is_contiguous() and block_table.dtype == torch.int32
    assert key.shape[1] == 1 and key.shape[2] == block_size and key.data_ptr() == value.data_ptr()
    out = torch.empty_like(query)
    for b, length in enumerate(actual_seq_lengths_kv):
        blocks = block_table[b, : -(-length // block_size)].long()
        latent = key[blocks, 0].flatten(0, 1)[:length].float()
        rope = key_rope[blocks, 0].flatten(0, 1)[:length].float()
        scores = (query[b, :, 0].float() @ latent.T + query_rope[b, :, 0].float() @ rope.T) * scale
        out[b, :, 0] = (scores.softmax(-1) @ latent).to(out.dtype)
    return out, query.new_empty(0)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
) -> list[Tensor]:
    (rows,), (w,) = x, weight
    assert group_list.dtype == torch.int64 and group_list_type == 1 and split_item in (2, 3) and rows.dtype == w.dtype
    ends = group_list.cumsum(0).tolist()
    begins = [0, *ends[:-1]]
    if group_type == 0:
        assert w.dim() == 3 and ends[-1] <= len(rows)
        parts = [rows[begin:end] @ w[e] for e, (begin, end) in enumerate(zip(begins, ends, strict=True))]
        parts.append(rows.new_full((len(rows) - ends[-1], w.shape[2]), NAN))  # past the last group: never written
        return [torch.cat(parts)]
    assert group_type == 2 and w.dim() == 2 and not rows.is_contiguous(), (
        "the split inner dimension wants a transposed x"
    )
    out = rows.new_full((len(ends), rows.shape[0], w.shape[1]), NAN)
    for e, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if end > begin:
            out[e] = rows[:, begin:end] @ w[begin:end]
    return [out]


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    assert len(tokens) > 0 and indices.dtype in (torch.int32, torch.int64)
    order = indices.flatten().argsort(stable=True)
    return tokens.index_select(0, order // indices.shape[1]), order.argsort().int()


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    assert len(permuted_tokens) > 0 and sorted_indices.dtype == torch.int32
    rows = permuted_tokens.index_select(0, sorted_indices)
    if probs is None:
        return rows
    weighted = rows.unflatten(0, tuple(probs.shape)).float() * probs.float().unsqueeze(-1)
    return weighted.sum(1).to(permuted_tokens.dtype)


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    assert bias is not None, "the kernel does not start without a bias"
    assert bias.dtype == x.dtype and (norm_type, group_select_mode, renorm) == (1, 1, 0)
    scores = x.detach().sigmoid()
    grouped = (scores + bias).unflatten(-1, (group_count, -1))
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    lost = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, group_scores.topk(k_group).indices, False)
    ids = grouped.masked_fill(lost.unsqueeze(-1), float("-inf")).flatten(-2).topk(k).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights, ids.int(), scores


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    assert indices.shape == (len(updates), 1) and updates.is_contiguous()
    input[indices[:, 0].long()] = updates
    return input
