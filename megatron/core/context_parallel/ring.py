"""Ring attention: keys and values are passed from rank to rank (``cp_comm_type`` "p2p"; arXiv 2310.01889).

In step s rank r has the block of rank j = r+s. Of a later rank's block (j > r) only r's second chunks see anything, and
they see all of it; of an earlier one's (j < r) all queries see the first chunks, and nothing else. So blocks go to the
next lower rank: a block is whole until rank 0 has had it, and from there, for the ranks above its owner, only its first
chunks travel. Gradients of a block are added up along its way; those of its second chunks go home from rank 0 directly.
Neither forward nor backward ever holds more than two travelling blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.context_parallel.block import Block, BlockAttention, take_rows, widen
from megatron.core.context_parallel.zigzag import ContextShard
from megatron.core.ops.reference_attention import merge


def ring_attention(
    q: Tensor,
    block: Block,
    weight: Tensor | None,
    attention: BlockAttention,
    shard: ContextShard,
    group: dist.ProcessGroup,
) -> Tensor:
    """q [t, N, Dq] and this rank's own block -> [t, N, Dv]; collective over ``group``, as is the backward."""
    return attend_around(Ring(shard, group), q, block, weight, attention)


def attend_around(ring: Ring, q: Tensor, block: Block, weight: Tensor | None, attention: BlockAttention) -> Tensor:
    """The same with a ring of the caller's, whose ``pass_on`` and ``pass_back`` bring what other ranks have."""
    out: Tensor = _RingAttention.apply(attention, ring, weight, q, *block)
    return out


@dataclass
class Arriving:
    """Transfers in flight: ``blocks`` are valid after ``wait``; the sent tensors are kept alive until then."""

    blocks: list[Block]
    sent: list[Block]
    works: list[dist.Work]

    def wait(self) -> list[Block]:
        for work in self.works:
            work.wait()
        return self.blocks


@dataclass(frozen=True)
class Ring:
    """Who sends what to whom; every rank posts the same transfers in the same steps."""

    shard: ContextShard
    group: dist.ProcessGroup | None = None  # None: a ring that exchanges nothing itself

    @property
    def rank(self) -> int:
        return self.shard.cp_rank

    @property
    def size(self) -> int:
        return self.shard.cp_size

    def is_whole(self, step: int) -> bool:
        """Whether this rank has, and needs, both chunks of the block of ``step``."""
        return self.rank + step < self.size

    def pass_on(self, block: Block, step: int) -> Arriving:
        """Hand on the block of ``step``; what arrives is that of the next step."""
        leaving = block if self.rank > 0 else take_rows(block, self.shard.first_rows)
        arriving = self.space(block, self.is_whole(step + 1))
        return self._exchange([(leaving, self.rank - 1)], [(arriving, self.rank + 1)])

    def pass_back(self, grads: Block, step: int) -> Arriving:
        """Hand on the gradient of the block of ``step``; what arrives belongs to the block of the next one.

        After the last step that is this rank's own. A second block that arrives is the own second chunks' gradient.
        """
        leaving, owner = [(grads, self.rank - 1)], step
        if self.rank == 0:
            leaving = [(take_rows(grads, self.shard.first_rows), -1), (take_rows(grads, self.shard.second_rows), owner)]
        arriving = [(self.space(grads, self.is_whole(step + 1)), self.rank + 1)]
        if self.rank == owner:
            arriving.append((self.space(grads, False), 0))
        return self._exchange(leaving, arriving)

    def space(self, like: Block, is_whole: bool) -> Block:
        """Memory for a block, or its gradient, with both chunks of every sequence or with the first ones."""
        rows = int(self.shard.local[-1] if is_whole else self.shard.half[-1])
        return tuple(x.new_empty(rows, *x.shape[1:]) for x in like)

    def _exchange(self, leaving: Sequence[tuple[Block, int]], arriving: Sequence[tuple[Block, int]]) -> Arriving:
        """Post all transfers at once; two ranks post the transfers between them in the same order."""
        assert self.group is not None, "a ring without a group has a pass_on and a pass_back of its own"
        leaving = [(tuple(x.contiguous() for x in block), peer) for block, peer in leaving]
        transfers: list[dist.P2POp] = []
        for operation, blocks in ((dist.isend, leaving), (dist.irecv, arriving)):
            for block, peer in blocks:
                peer_rank = dist.get_global_rank(self.group, peer % self.size)
                transfers.extend(dist.P2POp(operation, x, peer_rank, self.group) for x in block)
        works = dist.batch_isend_irecv(transfers)
        return Arriving([block for block, _ in arriving], [block for block, _ in leaving], works)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, attention: BlockAttention, ring: Ring, weight: Tensor | None, q: Tensor, *block: Tensor
    ) -> Any:
        shard, second = ring.shard, ring.shard.second_rows
        arriving = ring.pass_on(block, 0)  # overlaps with the attention to this rank's own block
        first_out, lse = attention.forward(q, block, weight, (shard.local, shard.local), causal=True)
        out, q_second = widen(first_out), q.index_select(0, second)
        for step in range(1, ring.size):
            (held,) = arriving.wait()
            if step + 1 < ring.size:
                arriving = ring.pass_on(held, step)
            if ring.is_whole(step):
                joined = out.index_select(0, second), lse.index_select(0, second)
                merge(*joined, *attention.forward(q_second, held, weight, (shard.half, shard.local), causal=False))
                out.index_copy_(0, second, joined[0])
                lse.index_copy_(0, second, joined[1])
            else:
                merge(out, lse, *attention.forward(q, held, weight, (shard.local, shard.half), causal=False))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, lse, weight, *block)
        ctx.attention, ctx.ring = attention, ring
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        attention, ring = ctx.attention, ctx.ring
        q, out, lse, weight, *saved = ctx.saved_tensors
        block, shard, second = tuple(saved), ring.shard, ring.shard.second_rows
        queries = (grad_out.contiguous(), q, out, lse)
        second_queries = [x.index_select(0, second) for x in queries]

        arriving = ring.pass_on(block, 0)
        own = attention.backward(queries, block, weight, (shard.local, shard.local), causal=True)
        grad_q, home = widen(own[0]), tuple(widen(x) for x in own[1])
        grad_weight = None if own[2] is None else widen(own[2])
        returning: Arriving | None = None
        for step in range(1, ring.size):
            (held,) = arriving.wait()
            if step + 1 < ring.size:
                arriving = ring.pass_on(held, step)
            if ring.is_whole(step):
                found = attention.backward(second_queries, held, weight, (shard.half, shard.local), causal=False)
                grad_q.index_add_(0, second, widen(found[0]))
            else:
                found = attention.backward(queries, held, weight, (shard.local, shard.half), causal=False)
                grad_q += found[0]
            grads = found[1]
            if grad_weight is not None:
                grad_weight += found[2]
            if returning is not None:
                arrived, *from_rank_0 = returning.wait()
                grads = tuple(x + y for x, y in zip(grads, arrived, strict=True))
                _add_rows(home, second, from_rank_0)
            returning = ring.pass_back(grads, step)
        assert returning is not None, "a ring has at least two ranks"
        arrived, *from_rank_0 = returning.wait()
        _add_rows(home, shard.first_rows, [arrived])
        _add_rows(home, second, from_rank_0)
        of_block = (x.to(y.dtype) for x, y in zip(home, block, strict=True))
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return None, None, of_weight, grad_q.to(q.dtype), *of_block


def _add_rows(total: Block, rows: Tensor, terms: Sequence[Block]) -> None:
    for term in terms:
        for x, y in zip(total, term, strict=True):
            x.index_add_(0, rows, widen(y))
