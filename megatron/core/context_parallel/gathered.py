"""Attention with all keys and values gathered on every rank (``cp_comm_type`` "all_gather").

Only local keys and values are kept between forward and backward, and backward gathers them again: the memory for the
keys and values of all ranks is needed in one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.context_parallel.block import Block, BlockAttention, widen
from megatron.core.context_parallel.zigzag import ContextShard
from megatron.core.tensor_parallel import collectives


def gathered_attention(
    q: Tensor,
    block: Block,
    weight: Tensor | None,
    attention: BlockAttention,
    shard: ContextShard,
    group: dist.ProcessGroup,
) -> Tensor:
    """q [t, N, Dq] and this rank's own block -> [t, N, Dv]; collective over ``group``, as is the backward."""
    out: Tensor = _GatheredAttention.apply(attention, shard, group, weight, q, *block)
    return out


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attention: BlockAttention,
        shard: ContextShard,
        group: dist.ProcessGroup,
        weight: Tensor | None,
        q: Tensor,
        *block: Tensor,
    ) -> Any:
        everything, _ = collectives.all_gather(_joined(block), group)
        results = []
        for rows, keys, bounds in _halves(shard):
            half = _split(everything.index_select(0, keys), block)
            results.append(attention.forward(q.index_select(0, rows), half, weight, bounds, causal=True))
        out, lse = (_put_together(shard, *halves) for halves in zip(*results, strict=True))
        ctx.save_for_backward(q, out, lse, weight, *block)
        ctx.attention, ctx.shard, ctx.group = attention, shard, group
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        q, out, lse, weight, *saved = ctx.saved_tensors
        block = tuple(saved)
        everything, _ = collectives.all_gather(_joined(block), ctx.group)
        grad_everything = torch.zeros_like(everything, dtype=widen(everything).dtype)
        grads_q, grad_weight = [], None if weight is None else torch.zeros_like(weight, dtype=widen(weight).dtype)
        for rows, keys, bounds in _halves(ctx.shard):
            half = _split(everything.index_select(0, keys), block)
            queries = [x.index_select(0, rows) for x in (grad_out, q, out, lse)]
            grad_q, grad_half, term = ctx.attention.backward(queries, half, weight, bounds, causal=True)
            grads_q.append(grad_q)
            grad_everything.index_add_(0, keys, widen(_joined(grad_half)))
            if grad_weight is not None:
                grad_weight += term
        grad_block, _ = collectives.reduce_scatter(grad_everything.to(everything.dtype), ctx.group)
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return None, None, None, of_weight, _put_together(ctx.shard, *grads_q), *_split(grad_block, block)


def _put_together(shard: ContextShard, first: Tensor, second: Tensor) -> Tensor:
    """Values of the first and of the second chunks -> of this rank's tokens."""
    whole = first.new_empty(len(first) + len(second), *first.shape[1:])
    return whole.index_copy_(0, shard.first_rows, first).index_copy_(0, shard.second_rows, second)


def _halves(shard: ContextShard) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, Tensor]]]:
    """This rank's first and second chunks: their rows, the gathered rows of what they see, the bounds of both."""
    for rows, (keys, bounds) in ((shard.first_rows, shard.keys_of_first), (shard.second_rows, shard.keys_of_second)):
        yield rows, keys, (shard.half, bounds)


def _joined(block: Block) -> Tensor:
    """[k, columns of all tensors]: one collective instead of one each."""
    return torch.cat([x.flatten(1) for x in block], dim=1)


def _split(joined: Tensor, like: Block) -> Block:
    parts = joined.split([x[0].numel() for x in like], dim=1)
    return tuple(part.unflatten(1, x.shape[1:]).contiguous() for part, x in zip(parts, like, strict=True))
