"""The arithmetic of exact mode: the result of a row depends on that row alone, not on the rows beside it.

Both op tables compute everything between a token and its log-probability with it, so a token has the same bits in any
batch, chunk or micro-batch.

Three rules hold everywhere. Matrix products have fixed shapes: ROWS rows, padded with zeros, of at most TERMS terms,
whose partial sums are added in order; attention multiplies QUERIES queries with KEYS keys at a time, counted from the
start of the sequence. Other sums go over a fixed tree. All else is elementwise: IEEE arithmetic, exp and log. Torch's
products and functions must then give an element the same bits at any position; each shape is checked at its first use.

16-bit operands are widened to float32 and results rounded once. Letters: T tokens, H hidden, N heads, D head size, R
rotary size, V value size, K experts of a token, E experts, b sequences, G (sequence, head) pairs, Q queries, S keys.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
TERMS = 256
QUERIES = 8
KEYS = 64
_NARROW = 16  # columns of the products with which all others are compared
_ALIGNMENT = 64  # bytes: products may depend on how their operands are aligned


def matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a @ b [M, N] in a's dtype; row m depends on a[m] and b only."""
    num_rows, num_terms = a_MK.shape
    if num_rows == 0 or num_terms == 0:
        return a_MK.new_zeros(num_rows, b_KN.shape[1])
    num_columns = b_KN.shape[1]
    wide_KN = _aligned(F.pad(_wide(b_KN), (0, max(0, _NARROW - num_columns))))
    padded = _aligned(F.pad(_wide(a_MK), (0, 0, 0, -num_rows % ROWS)))
    tiles = padded.view(-1, ROWS, num_terms)
    out = None
    for first in range(0, num_terms, TERMS):
        terms = slice(first, first + TERMS)
        part = _products(tiles[:, :, terms], wide_KN[terms].expand(len(tiles), -1, -1))
        out = part if out is None else out.add_(part)
    assert out is not None
    return out.flatten(0, 1)[:num_rows, :num_columns].to(a_MK.dtype)


def tree_sum(x: Tensor) -> Tensor:
    """Return the sum over the last dim, kept as 1: the second half is added to the first until one column is left."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        first, second = x[..., :half], x[..., half:]
        x = first + (second if second.shape[-1] == half else F.pad(second, (0, 1)))
    return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps), rounded to x's dtype, times weight."""
    wide = _wide(x)
    mean_square = tree_sum(wide * wide) / x.shape[-1]
    return (wide * (1.0 / (mean_square + eps).sqrt())).to(x.dtype) * weight


def swiglu(x_T2F: Tensor) -> Tensor:
    """Return silu(gate) * up, silu rounded to x's dtype."""
    gate, up = x_T2F.chunk(2, dim=-1)
    wide = _wide(gate)
    return (wide / (1.0 + _exp(-wide))).to(gate.dtype) * up


def rotary(x_TNR: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """Turn pairs (x[2i], x[2i+1]) by angle i < h = R/2; returns all first members, then all second ones."""
    cos, sin, wide = cos_Th.unsqueeze(1), sin_Th.unsqueeze(1), _wide(x_TNR)
    first, second = wide[..., 0::2], wide[..., 1::2]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_TNR.dtype)


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + _exp(-x))


def softmax(x: Tensor) -> Tensor:
    weights = _exp(x - x.amax(-1, keepdim=True))
    return weights / tree_sum(weights)


def choose_experts(
    scores_TE: Tensor, bias_E: Tensor | None, top_k: int, num_groups: int, topk_groups: int, best_of_group: int
) -> Tensor:
    """Return the experts with the largest scores + bias, int64 [T, K] in ascending order.

    They belong to the ``topk_groups`` groups whose ``best_of_group`` best experts have the largest sums.
    """
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if topk_groups < num_groups:
        grouped = choice_TE.unflatten(-1, (num_groups, -1))
        best = grouped.topk(min(best_of_group, grouped.shape[-1]), dim=-1).values
        kept = in_order(best).squeeze(-1).topk(topk_groups, dim=-1).indices
        dropped = torch.ones(grouped.shape[:-1], dtype=torch.bool).scatter_(1, kept, False)
        choice_TE = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
    return choice_TE.topk(top_k, dim=-1).indices.sort(-1).values


def in_order(x_TK: Tensor) -> Tensor:
    """Return [T, 1]: the columns, added one after the other."""
    total = x_TK[..., :1]
    for k in range(1, x_TK.shape[-1]):
        total = total + x_TK[..., k : k + 1]
    return total


def weighted_rows(rows_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """Return [T, H] in the rows' dtype: each token's rows times their weights, added one after the other."""
    total = _wide(rows_TKH[:, 0]) * weights_TK[:, :1]
    for k in range(1, rows_TKH.shape[1]):
        total = total + _wide(rows_TKH[:, k]) * weights_TK[:, k : k + 1]
    return total.to(rows_TKH.dtype)


def attend(q_GQD: Tensor, k_GSD: Tensor, v_GSV: Tensor, last_GQ: Tensor, scale: float) -> Tensor:
    """Return softmax(q k^T * scale) v, float32 [G, Q, V]; query i of a pair sees its keys 0 .. last[i].

    Q is a multiple of QUERIES and S of KEYS; the padding is finite. No gradient.
    """
    q_GQD, k_GSD, v_GSV = (_aligned(_wide(x)) for x in (q_GQD, k_GSD, v_GSV))
    out = q_GQD.new_empty(*q_GQD.shape[:2], v_GSV.shape[-1])
    key_of_column = torch.arange(k_GSD.shape[1])
    for first in range(0, q_GQD.shape[1], QUERIES):
        queries = slice(first, first + QUERIES)
        last = last_GQ[:, queries].unsqueeze(-1)
        blocks = [slice(start, start + KEYS) for start in range(0, int(last.max()) + 1, KEYS)]
        scores = []
        for keys in blocks:
            score = _products(q_GQD[:, queries], k_GSD[:, keys].transpose(1, 2)).mul_(scale)
            scores.append(score.masked_fill_(key_of_column[keys] > last, float("-inf")))
        peak = torch.stack([score.amax(-1, keepdim=True) for score in scores]).amax(0)
        weighted = total = None
        for keys, score in zip(blocks, scores, strict=True):
            weights = _exp(score.sub_(peak))
            values, weight = _products(weights, v_GSV[:, keys]), tree_sum(weights)
            weighted = values if weighted is None else weighted.add_(values)
            total = weight if total is None else total + weight
        assert weighted is not None and total is not None
        out[:, queries] = weighted / total
    return out


def attend_into(
    out_TNV: Tensor,
    q_TND: Tensor,
    tokens_bQ: Tensor,
    is_real_bQ: Tensor,
    last_bQ: Tensor,
    k_bSND: Tensor,
    v_bSNV: Tensor,
    scale: float,
) -> None:
    """Write the outputs of b sequences of Q queries, tokens of ``q_TND``; those that are not real are padding."""

    def pairs(x_bMNC: Tensor) -> Tensor:
        return x_bMNC.transpose(1, 2).flatten(0, 1)

    heads = q_TND.shape[1]
    last_GQ = last_bQ.repeat_interleave(heads, dim=0)
    out_GQV = attend(pairs(q_TND[tokens_bQ]), pairs(k_bSND), pairs(v_bSNV), last_GQ, scale)
    out_bQNV = out_GQV.unflatten(0, (len(tokens_bQ), heads)).transpose(1, 2)
    out_TNV[tokens_bQ[is_real_bQ]] = out_bQNV[is_real_bQ].to(out_TNV.dtype)


def log_sum_exp(x_TV: Tensor) -> Tensor:
    """Return logsumexp, float32 [T], by torch's own function, which is checked to treat each row alone."""
    _check_log_sum_exp(x_TV.shape[1], torch.get_num_threads())
    return _log_sum_exp(_wide(x_TV))


def _log_sum_exp(x_TV: Tensor) -> Tensor:
    if len(x_TV) == 1:  # a single long row would be split among the threads
        return torch.cat((x_TV, x_TV)).logsumexp(-1)[:1]
    return x_TV.logsumexp(-1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _aligned(x: Tensor) -> Tensor:
    """Return x contiguous and aligned."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _exp(x: Tensor) -> Tensor:
    _check_exp(x.dtype, torch.get_num_threads())
    return x.contiguous().exp()


def _products(a_BRK: Tensor, b_BKN: Tensor) -> Tensor:
    is_transposed = b_BKN.stride(-1) != 1
    shape = (a_BRK.shape[1], a_BRK.shape[2], b_BKN.shape[2])
    _check_products(*shape, is_transposed, a_BRK.dtype, torch.get_num_threads())
    return torch.bmm(a_BRK, b_BKN)


@cache
def _check_products(
    rows: int, terms: int, columns: int, is_transposed: bool, dtype: torch.dtype, num_threads: int
) -> None:
    """Require that a product of these sizes gives the same bits at every row and column, in every batch and width."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, rows, terms, generator=generator, dtype=dtype)
    b = torch.randn(terms, columns, generator=generator, dtype=dtype)

    def product(a: Tensor, b: Tensor) -> Tensor:
        b = b.t().contiguous().t() if is_transposed else b.contiguous()
        return torch.bmm(a, b.expand(len(a), -1, -1))

    expected = product(a, b)
    narrow = F.pad(b, (0, -columns % _NARROW)).split(_NARROW, dim=1)
    same = (
        torch.equal(product(a.roll(1, dims=1), b), expected.roll(1, dims=1)),
        torch.equal(product(a[:1], b), expected[:1]),
        torch.equal(product(a, b.roll(1, dims=1)), expected.roll(1, dims=2)),
        torch.equal(torch.cat([product(a, part) for part in narrow], dim=-1)[..., :columns], expected),
    )
    _require(all(same), f"a product [{rows}, {terms}] x [{terms}, {columns}] of {dtype}")


@cache
def _check_exp(dtype: torch.dtype, num_threads: int) -> None:
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(0), dtype=dtype)
    parts = torch.cat([part.clone().exp() for part in x[:4096].split(7)])
    _require(torch.equal(x.exp()[:4096], parts) and torch.equal(x.exp()[5:], x[5:].exp()), f"exp of {dtype}")


@cache
def _check_log_sum_exp(size: int, num_threads: int) -> None:
    x = torch.randn(37, size, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([_log_sum_exp(row.clone()) for row in x.split(1)])
    _require(torch.equal(_log_sum_exp(x), rows), f"logsumexp over {size}")


def _require(is_so: bool, what: str) -> None:
    if not is_so:
        raise RuntimeError(
            f"exact mode cannot run on this machine: {what}: torch {torch.__version__} gives an element other bits "
            f"at another position (threads: {torch.get_num_threads()}); set OMP_NUM_THREADS=1, or turn exact mode off"
        )
