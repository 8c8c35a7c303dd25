"""A plain-torch form of torch's two flash-attention ops, which have none on a CPU: their arguments, layouts, limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@contextmanager
def flash_attention_on_cpu() -> Iterator[list[tuple[str, int, int]]]:
    """Give aten's ops their CPU form; yields a list of the calls: the op, and the lengths of the longest sequences."""
    calls: list[tuple[str, int, int]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        calls.append(("forward", *arguments[2:4]))
        return _forward(q, k, v, *arguments, **named)

    def backward(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(("backward", *arguments[8:10]))
        return _backward(*arguments, **named)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """Returns out [T, N, D], lse [N, T], the state of the random numbers uint64 [2], nothing, no mask."""
    _check(q, k, v, bounds_q, bounds_k, max_q, max_k)
    assert dropout == 0.0 and not return_debug_mask
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for rows, keys in _sequences(bounds_q, bounds_k):
        scores = _scores(q[rows], k[keys], scale, is_causal)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = (scores.softmax(-1) @ _heads(v[keys], q)).transpose(0, 1).to(q.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, bounds_q, bounds_k, max_q, max_k)
    assert grad.shape == out.shape == q.shape and grad.dtype == out.dtype == q.dtype and dropout == 0.0
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert state.dtype == unused.dtype == torch.uint64 and state.shape == (2,) and unused.shape == ()
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _sequences(bounds_q, bounds_k):
        weights = (_scores(q[rows], k[keys], scale, is_causal) - lse[:, rows].unsqueeze(-1)).exp()
        wide_grad = grad[rows].transpose(0, 1).float()
        mean = (wide_grad * out[rows].transpose(0, 1).float()).sum(-1, keepdim=True)
        grad_scores = weights * (wide_grad @ _heads(v[keys], q).transpose(1, 2) - mean) * scale
        by_query_head = (
            grad_scores @ _heads(k[keys], q),
            grad_scores.transpose(1, 2) @ q[rows].transpose(0, 1).float(),
            weights.transpose(1, 2) @ wide_grad,
        )
        for index, x in ((rows, 0), (keys, 1), (keys, 2)):
            heads = grads[x].shape[1]
            summed = by_query_head[x].unflatten(0, (heads, -1)).sum(1)
            grads[x][index] = summed.transpose(0, 1).to(q.dtype)
    return grads


def _check(q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int) -> None:
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    for x in (q, k, v):
        assert x.stride(-1) == 1 and not any(stride % 8 for stride in x.stride()[:-1])
    for bounds, longest in ((bounds_q, max_q), (bounds_k, max_k)):
        assert bounds.dtype == torch.int32 and bounds.device == q.device and bounds.is_contiguous()
        assert int(bounds.diff().max()) <= longest


def _sequences(bounds_q: Tensor, bounds_k: Tensor) -> Iterator[tuple[slice, slice]]:
    for rows, keys in zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist()), strict=True):
        yield slice(*rows), slice(*keys)


def _scores(q: Tensor, k: Tensor, scale: float, is_causal: bool) -> Tensor:
    """[N, queries, keys] float32; the last query sees all keys."""
    scores = q.transpose(0, 1).float() @ _heads(k, q).transpose(1, 2) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """[keys, M, D] as float32 [N, keys, D]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).transpose(0, 1).float()
