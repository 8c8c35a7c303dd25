"""Collectives over dim 0, without gradients, in the form that gloo, nccl and hccl have in common.

torch renamed two of them (2.13 warns about the old names, 2.5 has only those), so they are looked up here and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> tuple[Tensor, dist.Work | None]:
    """x [n, ...] of every rank -> ([n * size, ...] in rank order, the work to wait for when ``async_op``)."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    return out, _all_gather(out, x.contiguous(), group=group, async_op=async_op)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> tuple[Tensor, dist.Work | None]:
    """x [n * size, ...] of every rank -> (this rank's [n, ...] of the sum, the work to wait for when ``async_op``)."""
    rows, rest = divmod(x.shape[0], group.size())
    assert rest == 0, f"{x.shape[0]} rows do not divide over {group.size()} ranks; pad the packed tokens"
    out = x.new_empty(rows, *x.shape[1:])
    return out, _reduce_scatter(out, x.contiguous(), group=group, async_op=async_op)


def reduce_scatter_in_place(
    flat: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Sum ``flat`` over ``group`` into ``shard``, this rank's part of it; the other parts become garbage."""
    work: dist.Work | None = _reduce_scatter(shard, flat, group=group, async_op=async_op)
    return work


def all_gather_in_place(
    flat: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Fill every other rank's part of ``flat`` from its owner; ``shard`` is this rank's part of ``flat``."""
    work: dist.Work | None = _all_gather(flat, shard, group=group, async_op=async_op)
    return work


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, async_op: bool = False
) -> dist.Work | None:
    """Reduce x over ``group`` in place."""
    return dist.all_reduce(x, op=op, group=group, async_op=async_op) if group.size() > 1 else None


def all_to_all_rows(
    x: Tensor,
    group: dist.ProcessGroup,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    async_op: bool = False,
) -> tuple[Tensor, dist.Work | None]:
    """Send ``input_splits[r]`` rows of x to rank r and receive ``output_splits[r]`` from it, in rank order."""
    out = x.new_empty(sum(output_splits), *x.shape[1:])
    splits = list(output_splits), list(input_splits)
    return out, dist.all_to_all_single(out, x.contiguous(), *splits, group=group, async_op=async_op)
