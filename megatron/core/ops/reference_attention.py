"""Attention over packed sequences in plain torch: whole sequences as a padded rectangle, blocks of keys one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.contract import Attended, Bounds, CoreAttention
from megatron.core.packed_seq_params import SharedPrompts


def core_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
) -> Tensor:
    """See ``contract.CoreAttention``.

    Padding comes after each sequence, so the causal mask alone hides it. v is padded to q's head size,
    because torch's fused kernels want equal sizes; shared heads are repeated, because few of them take less.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    num_sequences, value_size = cu_seqlens.numel() - 1, v.shape[-1]
    cu_seqlens = cu_seqlens.to(q.device)
    lengths = cu_seqlens.diff()
    # Row of token t in the [B * L] rectangle: its own index plus the padding of all sequences before its own.
    shift = torch.arange(num_sequences, device=q.device) * max_seqlen - cu_seqlens[:-1]
    rows = torch.repeat_interleave(shift, lengths, output_size=q.shape[0]) + torch.arange(q.shape[0], device=q.device)

    def pad(x: Tensor) -> Tensor:
        rectangle = x.new_zeros(num_sequences * max_seqlen, *x.shape[1:]).index_copy(0, rows, x)
        return rectangle.view(num_sequences, max_seqlen, *x.shape[1:]).transpose(1, 2)

    if value_size < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - value_size))
    mask = None
    if not causal:
        mask = (torch.arange(max_seqlen, device=q.device) < lengths.unsqueeze(1))[:, None, None, :]
    out = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), attn_mask=mask, is_causal=causal, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, rows)[..., :value_size]


def whole_sequence_attention(
    core_attention: CoreAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    shared: SharedPrompts,
) -> Tensor:
    """See ``contract.SharedPromptAttention``; ``core_attention`` gets a copy of a prompt for each of its sequences."""
    q, k, v = (rows.index_select(0, shared.computed_F) for rows in (q, k, v))
    return core_attention(q, k, v, cu_seqlens, max_seqlen, scale, True).index_select(0, shared.whole_T)


# The largest number of float32 scores in memory at one time.
MAX_SCORES = 2**25


def attention_block(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """See ``contract.AttentionBlock``."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[:2], dtype=_wide(q).dtype, device=q.device)
    for rows, keys, hidden in _pieces(q, bounds, causal):
        scores = _scores(q[rows], k[keys], scale, hidden)
        lse[rows] = scores.logsumexp(-1).flatten(0, 1).T
        weights = scores.softmax(-1)
        out[rows] = torch.einsum("mgqk,kmd->qmgd", weights, _wide(v[keys])).flatten(1, 2).to(out.dtype)
    return out, lse


def attention_block_grad(
    grad_out: Tensor, attended: Attended, bounds: Bounds, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``contract.AttentionBlockGrad``."""
    q, k, v, out, lse = attended
    shape = (k.shape[1], -1)  # M, N/M
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=_wide(x).dtype) for x in (q, k, v))
    for rows, keys, hidden in _pieces(q, bounds, causal):
        lse_MGq = lse[rows].T.unflatten(0, shape)
        weights = (_scores(q[rows], k[keys], scale, hidden) - lse_MGq.unsqueeze(-1)).exp_()
        grad_qMGd = _wide(grad_out[rows]).unflatten(1, shape)
        grad_v[keys] += torch.einsum("mgqk,qmgd->kmd", weights, grad_qMGd)
        grad_weights = torch.einsum("qmgd,kmd->mgqk", grad_qMGd, _wide(v[keys]))
        mean = (grad_qMGd * _wide(out[rows]).unflatten(1, shape)).sum(-1).permute(1, 2, 0)
        grad_scores = grad_weights.sub_(mean.unsqueeze(-1)).mul_(weights).mul_(scale)
        grad_q[rows] = torch.einsum("mgqk,kmd->qmgd", grad_scores, _wide(k[keys])).flatten(1, 2)
        grad_k[keys] += torch.einsum("mgqk,qmgd->kmd", grad_scores, _wide(q[rows]).unflatten(1, shape))
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Join, in place, the attention to two sets of keys: each output counts by its share of the denominator."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(_wide(more) * (more_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _pieces(q: Tensor, bounds: Bounds, causal: bool) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield some queries of one sequence, its keys, and the mask [queries, keys] of hidden keys (None: no key)."""
    ends_q, ends_k = (ends.tolist() for ends in bounds)
    for (start_q, end_q), (start_k, end_k) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        num_keys = end_k - start_k
        step = max(1, MAX_SCORES // max(1, q.shape[1] * num_keys))
        for first in range(start_q, end_q, step):
            last = min(first + step, end_q)
            hidden = None
            if causal:
                seen = torch.arange(first, last, device=q.device) + (num_keys - end_q)  # last key that a query sees
                hidden = torch.arange(num_keys, device=q.device) > seen.unsqueeze(1)
            yield slice(first, last), slice(start_k, end_k), hidden


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    """[M, N/M, queries, keys], at least float32."""
    q_qMGd = _wide(q).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qmgd,kmd->mgqk", q_qMGd, _wide(k)).mul_(scale)
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
