"""Collectives with gradients: how activations enter and leave tensor- and sequence-parallel regions.

Every mapping is a pair of operations that are each other's transpose, one for the forward pass and one for the
gradient. In a group of one rank all of them are the identity. Sequence-parallel regions split dim 0 (the packed
tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.tensor_parallel import collectives

Operation = Callable[[Tensor, dist.ProcessGroup], Tensor]


def copy_to_tensor_model_parallel_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: x as it is. Backward: the sum over ``group``."""
    return map_over_group(x, group, _keep, _all_reduce)


def reduce_from_tensor_model_parallel_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: the sum over ``group``. Backward: the gradient as it is."""
    return map_over_group(x, group, _all_reduce, _keep)


def gather_from_sequence_parallel_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: the rows of all ranks. Backward: this rank's rows of the summed gradient."""
    return map_over_group(x, group, _gather_rows, _scatter_sum)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: this rank's rows of the sum over ``group``. Backward: the rows of all ranks."""
    return map_over_group(x, group, _scatter_sum, _gather_rows)


def gather_from_tensor_model_parallel_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Forward: the columns of all ranks' [T, F/TP], [T, F]. Backward: this rank's columns of the summed gradient."""
    return map_over_group(x, group, _gather_columns, _scatter_column_sum)


@dataclass
class Exchange:
    """An all-to-all of the rows of x [n, ...] in two halves, and the reverse exchange for their gradient.

    ``output_split_sizes``, ``input_split_sizes``: rows from and to each rank. Work between ``start`` and ``finish``
    overlaps with the transfer, and its backward overlaps with the gradient's transfer: autograd runs the operations in
    the reverse of forward's order. Call each method once per exchange.
    """

    group: dist.ProcessGroup
    output_split_sizes: Sequence[int]
    input_split_sizes: Sequence[int]
    arriving: Tensor | None = None
    work: dist.Work | None = None

    def start(self, x: Tensor) -> Tensor:
        """Send x; the returned tensor may only be passed to ``finish``."""
        rows: Tensor = x if self.group.size() == 1 else _StartExchange.apply(x, self)
        return rows

    def finish(self, rows: Tensor) -> Tensor:
        received: Tensor = rows if self.group.size() == 1 else _FinishExchange.apply(rows, self)
        return received

    def _send(self, x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> None:
        self.arriving, self.work = collectives.all_to_all_rows(
            x, self.group, output_splits, input_splits, async_op=True
        )

    def _receive(self) -> Tensor:
        assert self.work is not None and self.arriving is not None, "nothing is on its way"
        self.work.wait()
        rows, self.arriving, self.work = self.arriving, None, None
        return rows


def all_to_all(
    group: dist.ProcessGroup, x: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
) -> Tensor:
    """Exchange rows of x, possibly different numbers between every two ranks; the gradient goes back the same way."""
    exchange = Exchange(group, output_split_sizes, input_split_sizes)
    return exchange.finish(exchange.start(x))


def all_to_all_hp2sp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From all rows of a part of the last dim, [T, F/TP], to all of it for this rank's rows, [T/TP, F], and back."""
    size = group.size()
    if size == 1:
        return x
    rows, rest = divmod(x.shape[0], size)
    assert rest == 0, f"{x.shape[0]} rows do not divide over {size} ranks; pad the packed tokens"
    parts = all_to_all(group, x, [rows] * size, [rows] * size)  # my rows, a part of the features from each rank
    return parts.unflatten(0, (size, rows)).transpose(0, 1).flatten(1)


def map_over_group(x: Tensor, group: dist.ProcessGroup, forward: Operation, backward: Operation) -> Tensor:
    """``forward(x, group)``, whose gradient is ``backward(gradient, group)``; x itself in a group of one rank."""
    if group.size() == 1:
        return x
    mapped: Tensor = _Mapping.apply(x, group, forward, backward)
    return mapped


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Operation, backward: Operation) -> Tensor:
        ctx.group, ctx.operation = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.operation(grad, ctx.group), None, None, None


class _StartExchange(torch.autograd.Function):
    """Forward sends. Backward receives; the gradient that it is handed stands for the one on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange._send(x, exchange.output_split_sizes, exchange.input_split_sizes)
        assert exchange.arriving is not None
        return exchange.arriving.view_as(exchange.arriving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange._receive(), None


class _FinishExchange(torch.autograd.Function):
    """Forward receives. Backward sends."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange._receive()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        exchange._send(grad, exchange.input_split_sizes, exchange.output_split_sizes)
        return grad, None


def _keep(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(total, group)
    return total


def _gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.all_gather(x, group)[0]


def _gather_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _gather_rows(x.t().contiguous(), group).t()


def _scatter_column_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _scatter_sum(x.t().contiguous(), group).t()


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.reduce_scatter(x, group)[0]
