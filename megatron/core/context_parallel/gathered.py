"""Attention with all keys and values gathered on every rank (``cp_comm_type`` "all_gather").

Only local keys and values are kept between forward and backward, which gathers them again: the memory for those of all
ranks is needed in one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.context_parallel.block import Block, BlockAttention, widen
from megatron.core.context_parallel.zigzag import ContextShard
from megatron.core.tensor_parallel import collectives


def gathered_attention(
    q: torch.Tensor, block: Block, attention: BlockAttention, shard: ContextShard, group: dist.ProcessGroup
) -> torch.Tensor:
    """q [t, N, Dq] and this rank's own block -> [t, N, Dv]; collective over ``group``, as is the backward."""
    out: torch.Tensor = _GatheredAttention.apply(attention, shard, group, q, *block)
    return out


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attention: BlockAttention,
        shard: ContextShard,
        group: dist.ProcessGroup,
        q: torch.Tensor,
        *block: torch.Tensor,
    ) -> Any:
        everything, _ = collectives.all_gather(_joined(block), group)
        out = q.new_empty(*q.shape[:2], block[1].shape[-1])
        lse = torch.empty(q.shape[:2], dtype=widen(q).dtype, device=q.device)
        for rows, keys, bounds in _halves(shard):
            half = _split(everything.index_select(0, keys), block)
            half_out, half_lse = attention.forward(q.index_select(0, rows), half, bounds, causal=True)
            out.index_copy_(0, rows, half_out)
            lse.index_copy_(0, rows, half_lse)
        ctx.save_for_backward(q, out, lse, *block)
        ctx.attention, ctx.shard, ctx.group = attention, shard, group
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        q, out, lse, *saved = ctx.saved_tensors
        out_and_lse, block = (out, lse), tuple(saved)
        everything, _ = collectives.all_gather(_joined(block), ctx.group)
        grad_q, grad_everything = torch.empty_like(q), torch.zeros_like(everything, dtype=widen(everything).dtype)
        for rows, keys, bounds in _halves(ctx.shard):
            half = _split(everything.index_select(0, keys), block)
            of_rows = [x.index_select(0, rows) for x in (grad_out, q, *out_and_lse)]
            grads = ctx.attention.backward(of_rows[0], of_rows[1], half, of_rows[2:], bounds, causal=True)
            grad_q.index_copy_(0, rows, grads[0])
            grad_everything.index_add_(0, keys, widen(_joined(grads[1])))
        grad_block, _ = collectives.reduce_scatter(grad_everything.to(everything.dtype), ctx.group)
        return None, None, None, grad_q, *_split(grad_block, block)


def _halves(shard: ContextShard) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """This rank's first and second chunks: their rows, the gathered rows of what they see, the bounds of both."""
    for rows, (keys, bounds) in (
        (shard.first_rows, shard.keys_of_first),
        (shard.second_rows, shard.keys_of_second),
    ):
        yield rows, keys, (shard.half, bounds)


def _joined(block: Block) -> torch.Tensor:
    """[k, columns of all tensors]: one collective instead of one each."""
    return torch.cat([x.flatten(1) for x in block], dim=1)


def _split(joined: torch.Tensor, like: Block) -> Block:
    parts = joined.split([x[0].numel() for x in like], dim=1)
    return tuple(part.unflatten(1, x.shape[1:]).contiguous() for part, x in zip(parts, like, strict=True))
