"""Attention with keys and values travelling from rank to rank (``cp_comm_type`` "p2p"; arXiv 2310.01889).

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

from megatron.core.context_parallel.block import Block, BlockAttention, merge, take_rows, widen
from megatron.core.context_parallel.zigzag import ContextShard


def ring_attention(
    q: torch.Tensor, block: Block, attention: BlockAttention, shard: ContextShard, group: dist.ProcessGroup
) -> torch.Tensor:
    """q [t, N, Dq] and this rank's own block -> [t, N, Dv]; collective over ``group``, as is the backward."""
    out: torch.Tensor = _RingAttention.apply(attention, _Ring(group, shard), q, *block)
    return out


@dataclass
class _Arriving:
    """Transfers under way: ``blocks`` are good after ``wait``; what is sent is kept until then."""

    blocks: list[Block]
    sent: list[Block]
    works: list[dist.Work]

    def wait(self) -> list[Block]:
        for work in self.works:
            work.wait()
        return self.blocks


@dataclass(frozen=True)
class _Ring:
    """Who sends what to whom; every rank posts the same transfers in the same steps."""

    group: dist.ProcessGroup
    shard: ContextShard

    @property
    def rank(self) -> int:
        return self.shard.cp_rank

    @property
    def size(self) -> int:
        return self.shard.cp_size

    def is_whole(self, step: int) -> bool:
        """Whether this rank has, and needs, both chunks of the block of ``step``."""
        return self.rank + step < self.size

    def pass_on(self, block: Block, step: int) -> _Arriving:
        """Hand on the block of ``step``; what arrives is that of the next step."""
        leaving = block if self.rank > 0 else take_rows(block, self.shard.first_rows)
        arriving = self._space(block, self.is_whole(step + 1))
        return self._exchange([(leaving, self.rank - 1)], [(arriving, self.rank + 1)])

    def pass_back(self, grads: Block, step: int) -> _Arriving:
        """Hand on the gradient of the block of ``step``; what arrives belongs to the block of the next one.

        After the last step that is this rank's own. A second block that arrives is the own second chunks' gradient.
        """
        leaving, owner = [(grads, self.rank - 1)], step
        if self.rank == 0:
            leaving = [(take_rows(grads, self.shard.first_rows), -1), (take_rows(grads, self.shard.second_rows), owner)]
        arriving = [(self._space(grads, self.is_whole(step + 1)), self.rank + 1)]
        if self.rank == owner:
            arriving.append((self._space(grads, False), 0))
        return self._exchange(leaving, arriving)

    def _space(self, like: Block, is_whole: bool) -> Block:
        rows = int(self.shard.local[-1] if is_whole else self.shard.half[-1])
        return tuple(x.new_empty(rows, *x.shape[1:]) for x in like)

    def _exchange(self, leaving: Sequence[tuple[Block, int]], arriving: Sequence[tuple[Block, int]]) -> _Arriving:
        """Post all transfers at once: between two ranks they are matched in order, the same on both sides."""
        leaving = [(tuple(x.contiguous() for x in block), peer) for block, peer in leaving]
        transfers: list[dist.P2POp] = []
        for operation, blocks in ((dist.isend, leaving), (dist.irecv, arriving)):
            for block, peer in blocks:
                peer_rank = dist.get_global_rank(self.group, peer % self.size)
                transfers.extend(dist.P2POp(operation, x, peer_rank, self.group) for x in block)
        works = dist.batch_isend_irecv(transfers)
        return _Arriving([block for block, _ in arriving], [block for block, _ in leaving], works)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: BlockAttention, ring: _Ring, q: torch.Tensor, *block: torch.Tensor) -> Any:
        shard = ring.shard
        second = shard.second_rows
        arriving = ring.pass_on(block, 0)  # beside the attention to the own block
        first_out, lse = attention.forward(q, block, (shard.local, shard.local), causal=True)
        out, q_second = widen(first_out), q.index_select(0, second)
        for step in range(1, ring.size):
            (held,) = arriving.wait()
            if step + 1 < ring.size:
                arriving = ring.pass_on(held, step)
            if ring.is_whole(step):
                joined = out.index_select(0, second), lse.index_select(0, second)
                merge(*joined, *attention.forward(q_second, held, (shard.half, shard.local), causal=False))
                out.index_copy_(0, second, joined[0])
                lse.index_copy_(0, second, joined[1])
            else:
                merge(out, lse, *attention.forward(q, held, (shard.local, shard.half), causal=False))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, lse, *block)
        ctx.attention, ctx.ring = attention, ring
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        attention, ring = ctx.attention, ctx.ring
        q, out, lse, *saved = ctx.saved_tensors
        block, shard, second = tuple(saved), ring.shard, ring.shard.second_rows
        queries = (grad_out.contiguous(), q, out, lse)
        second_queries = [x.index_select(0, second) for x in queries]

        def grads_of(queries: Sequence[torch.Tensor], keys: Block, bounds: Any, causal: bool) -> Any:
            return attention.backward(queries[0], queries[1], keys, queries[2:], bounds, causal)

        arriving = ring.pass_on(block, 0)
        grad_q, own_grads = grads_of(queries, block, (shard.local, shard.local), True)
        grad_q, home = widen(grad_q), tuple(widen(x) for x in own_grads)
        returning: _Arriving | None = None
        for step in range(1, ring.size):
            (held,) = arriving.wait()
            if step + 1 < ring.size:
                arriving = ring.pass_on(held, step)
            if ring.is_whole(step):
                grad_second, grads = grads_of(second_queries, held, (shard.half, shard.local), False)
                grad_q.index_add_(0, second, widen(grad_second))
            else:
                grad_all, grads = grads_of(queries, held, (shard.local, shard.half), False)
                grad_q += grad_all
            if returning is not None:
                arrived, *from_rank_0 = returning.wait()
                grads = tuple(x + y for x, y in zip(grads, arrived, strict=True))
                _add_rows(home, second, from_rank_0)
            returning = ring.pass_back(grads, step)
        assert returning is not None, "a ring has at least two ranks"
        arrived, *from_rank_0 = returning.wait()
        _add_rows(home, shard.first_rows, [arrived])
        _add_rows(home, second, from_rank_0)
        return None, None, grad_q.to(q.dtype), *(x.to(y.dtype) for x, y in zip(home, block, strict=True))


def _add_rows(total: Block, rows: torch.Tensor, terms: Sequence[Block]) -> None:
    for term in terms:
        for x, y in zip(total, term, strict=True):
            x.index_add_(0, rows, widen(y))
