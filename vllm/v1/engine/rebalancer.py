"""Moves requests between the DP replicas of an instance during a long generation, and brings them home at its end.

A step is as slow as the fullest replica: with shared experts all replicas step together, and graphs are padded to one
batch size. When most samples of one replica have finished and those of another have not, moving some balances them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.parallel_state import GroupCoordinator, ParallelState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

# What a request keeps of its own when its guest comes home with everything else.
OWN_FIELDS = ("request_id", "detokenizer")


class Rebalancer:
    """One rank's part. `balance` and `bring_home` are collective over the DP groups and TP groups of the instance.

    The home of a request is the replica that was asked for it. Its `Request` object waits there while a copy, the
    guest, runs elsewhere; a guest may move again. Draws depend on seed and position alone, so a moved request gets the
    same tokens as at home. The cache of a running request moves with it if the receiver will run it at once; otherwise
    its tokens are computed again.
    """

    def __init__(
        self,
        interval: int,
        padded_sizes: tuple[int, ...],
        scheduler: Scheduler,
        parallel: ParallelState,
        device: torch.device,
        kv_caches: Callable[[], Sequence[tuple[Tensor, ...]]],
        prepare: Callable[[Request], None] = lambda request: None,
    ) -> None:
        """Prepare to move requests every `interval` steps, never if it is 0.

        padded_sizes: batch sizes that steps are padded to, ascending.
        prepare: called with each request from another replica before it is queued here.
        """
        self.interval, self._padded_sizes, self.scheduler, self.device = interval, padded_sizes, scheduler, device
        self._kv_caches, self._prepare = kv_caches, prepare
        self.dp, self.tp, self._is_lockstep = parallel.dp, parallel.tp, parallel.config.steps_in_lockstep
        self.rank, self.num_replicas = self.dp.rank_in_group, self.dp.world_size
        self.num_moves = self.num_blocks_moved = 0  # of the whole instance, over its life
        self._away: dict[int, Request] = {}  # of this home, by key
        self._guests: list[Request] = []  # came here, of another home; finished ones too
        self._next_key = 0
        self._has_moved = False  # any replica's request since all were at home; the same on every rank
        self._num_steps = 0  # since the last round

    @property
    def is_at_round(self) -> bool:
        """Whether a round was the last thing, where all replicas are at the same place; always without rebalancing."""
        return self._num_steps == 0

    def after_step(self, is_busy: bool) -> bool:
        """Balance, if it is time: after every `interval` steps, or at once where this replica has no work and steps
        alone.

        `is_busy` says whether this replica, or one in lock-step with it, has work left; returns this of all replicas.
        """
        if not self.interval:
            return is_busy
        self._num_steps += 1
        if self._num_steps < self.interval and (is_busy or self._is_lockstep):
            return is_busy
        self._num_steps = 0
        return self.balance()

    def balance(self) -> bool:
        """Move the surplus of full replicas to empty ones if it pays; returns whether any replica has work left."""
        unfinished = self.scheduler.unfinished
        free = self.scheduler.kv.pool.num_blocks - sum(map(self._blocks_needed, unfinished))
        counts, free_blocks = self._gather([len(unfinished), free]).T.tolist()
        target = target_load(counts, self._padded_sizes)
        surplus = [max(0, count - target) for count in counts]
        if max(surplus) > 0:
            offered = self._cheapest(unfinished, surplus[self.rank])
            rows = [(self._blocks_needed(request), self._blocks_filled(request)) for request in offered]
            rows += [(0, 0)] * (max(surplus) - len(rows))
            needed, filled = self._gather([list(column) for column in zip(*rows, strict=True)]).transpose(1, 0, 2)
            loads = [
                Load(count, blocks, tuple(row[:extra]))
                for count, blocks, row, extra in zip(counts, free_blocks, needed.tolist(), surplus, strict=True)
            ]
            moves = plan_moves(loads, self._padded_sizes)
            if moves:
                self._carry_out(moves, offered, self._blocks_sent(moves, counts, filled.tolist()))
        return sum(counts) > 0

    def bring_home(self) -> None:
        """Return every guest to its home; afterwards no request of this replica is elsewhere."""
        self._num_steps = 0
        if not self._has_moved:
            return
        parts: list[list[Request]] = [[] for _ in range(self.num_replicas)]
        for guest in self._guests:
            assert guest.home is not None
            parts[guest.home[0]].append(guest)
        for request in exchange_objects(self.dp, parts, self.device):
            self._restore(request)
        assert not self._away, f"{len(self._away)} requests did not come back"
        self.forget()

    def forget(self) -> None:
        """Drop guests and absent requests: the generation has ended or failed."""
        self._away, self._guests, self._has_moved, self._num_steps = {}, [], False, 0

    def _carry_out(self, moves: list[Move], offered: list[Request], num_blocks: list[int]) -> None:
        """Send and receive requests, num_blocks[i] blocks of the cache with the i-th move."""
        self._has_moved = True
        self.num_moves += len(moves)
        self.num_blocks_moved += sum(num_blocks)
        parts: list[list[tuple[Request, int]]] = [[] for _ in range(self.num_replicas)]
        sent: list[list[int]] = [[] for _ in range(self.num_replicas)]
        received: list[list[int]] = [[] for _ in range(self.num_replicas)]
        for move, count in zip(moves, num_blocks, strict=True):
            if move.source == self.rank:
                request = offered[move.index]
                num_computed = request.num_computed_tokens if count else 0
                sent[move.destination] += request.block_ids[:count]
                self._take_out(request)
                parts[move.destination].append((request, num_computed))
        guests = iter(exchange_objects(self.dp, parts, self.device))
        # They come in rank order, and of one rank in the order of the plan.
        for move in sorted((m for m in moves if m.destination == self.rank), key=lambda m: m.source):
            received[move.source] += self._take_in(*next(guests))
        if any(num_blocks):
            exchange_blocks(self.dp, self._kv_caches(), sent, received)

    def _take_out(self, request: Request) -> None:
        self.scheduler.withdraw(request)
        if request.home is None:
            request.home = (self.rank, self._next_key)
            self._next_key += 1
        if request.home[0] == self.rank:
            self._away[request.home[1]] = request
        else:
            self._guests.remove(request)

    def _take_in(self, request: Request, num_computed: int) -> list[int]:
        """Queue a request from another replica, of which `num_computed` tokens are in the cache that travels with it.

        Return the blocks that this cache goes to.
        """
        assert request.home is not None
        home, key = request.home
        if home == self.rank:
            request = self._restore(request)
        else:
            request.request_id = f"guest_{home}_{key}"
            self._guests.append(request)
        self._prepare(request)
        self.scheduler.add_request(request)
        if num_computed:
            blocks = self.scheduler.kv.allocate_slots(request, num_computed)
            assert blocks is not None, "the plan gives no replica more than it has blocks for"
            request.num_computed_tokens = num_computed
        return list(request.block_ids)

    def _restore(self, returned: Request) -> Request:
        """Write the state of a returned request into the object that the caller holds, and return that object."""
        assert returned.home is not None
        request = self._away.pop(returned.home[1])
        for name in set(Request.__slots__) - set(OWN_FIELDS):
            setattr(request, name, getattr(returned, name))
        return request

    def _blocks_sent(self, moves: list[Move], counts: list[int], filled: list[list[int]]) -> list[int]:
        """Blocks of the cache that travel with each move: all that are filled, if the receiver has a place in its batch
        for each of its requests; none otherwise.
        """
        counts = list(counts)
        blocks = []
        for move in moves:
            has_place = counts[move.destination] < self.scheduler.config.max_num_seqs
            blocks.append(filled[move.source][move.index] if has_place else 0)
            counts[move.destination] += 1
        return blocks

    def _cheapest(self, unfinished: list[Request], count: int) -> list[Request]:
        """Return the `count` requests that are cheapest to move: fewest tokens in the cache, youngest first."""
        youngest_first = unfinished[::-1]
        return sorted(youngest_first, key=lambda request: request.num_computed_tokens)[:count]

    def _blocks_filled(self, request: Request) -> int:
        return -(-request.num_computed_tokens // self.scheduler.kv.block_size)

    def _blocks_needed(self, request: Request) -> int:
        """KV blocks that the request will fill by the next round."""
        length = min(len(request.token_ids) + self.interval, request.longest)
        return -(-length // self.scheduler.kv.block_size)

    def _gather(self, values: list[int] | list[list[int]]) -> np.ndarray:
        """int64 [replicas, *shape of values]; the first TP rank of a replica speaks for it."""
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        everyone: np.ndarray = self.dp.all_gather(self.tp.all_gather(mine)[0]).cpu().numpy()
        return everyone


def exchange_objects(group: GroupCoordinator, parts: Sequence[Sequence[Any]], device: torch.device) -> list[Any]:
    """Send the objects parts[d] to each rank d; return those of all ranks for this one, in rank order."""
    pickled = [pickle.dumps(part) for part in parts]
    sent = [np.frombuffer(part.ljust(-(-len(part) // 8) * 8), dtype=np.int64) for part in pickled]  # of whole words
    sizes = group.all_gather(torch.tensor([len(part) for part in sent], dtype=torch.int64, device=device)).tolist()
    sent_sizes, received_sizes = sizes[group.rank_in_group], [row[group.rank_in_group] for row in sizes]
    words = group.all_to_all(torch.from_numpy(np.concatenate(sent)).to(device), sent_sizes, received_sizes).cpu()
    return [one for part in words.split(received_sizes) for one in pickle.loads(part.numpy().tobytes())]


def exchange_blocks(
    group: GroupCoordinator,
    caches: Sequence[tuple[Tensor, ...]],
    sent: Sequence[Sequence[int]],
    received: Sequence[Sequence[int]],
) -> None:
    """Copy the content of blocks sent[d] to each rank d, and into blocks received[s] what comes from each rank s.

    One tensor of one layer at a time, so that the copies take one such tensor's part of the moved cache.
    """
    sent_sizes, received_sizes = [len(blocks) for blocks in sent], [len(blocks) for blocks in received]
    for pages in (tensor for cache in caches for tensor in cache):
        sources, targets = (
            torch.tensor([block for blocks in lists for block in blocks], dtype=torch.int64, device=pages.device)
            for lists in (sent, received)
        )
        arrived = group.all_to_all(pages.index_select(0, sources), sent_sizes, received_sizes)
        pages.index_copy_(0, targets, arrived)


# A target above this fraction of the largest load is not worth the moves: each costs a prefill of its request.
WORTH = 0.1


@dataclass(frozen=True)
class Load:
    """What one replica holds: unfinished requests, and the KV blocks left when all of them have grown until the next
    round; and the blocks that each request it could give away will need by then, the first to go first.
    """

    num_requests: int
    free_blocks: int
    blocks_needed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Move:
    """Replica `source` gives the `index`-th of the requests it offered to replica `destination`."""

    source: int
    index: int
    destination: int


def target_load(counts: Sequence[int], sizes: Sequence[int] = ()) -> int:
    """The largest number of requests that a replica keeps: max(counts) when moving is not worth it.

    A step costs what its padded batch costs: `sizes`, ascending, are the batch sizes that steps are padded to; without
    them, and beyond the largest, nothing is padded. The target is the least padded size under which all requests fit
    when spread evenly; what a replica holds above it is its surplus.
    """
    largest, even = max(counts), -(-sum(counts) // len(counts))
    target = min(_padded(even, sizes), largest)
    return target if _padded(largest, sizes) - target >= max(1.0, WORTH * largest) else largest


def plan_moves(loads: Sequence[Load], sizes: Sequence[int] = ()) -> list[Move]:
    """Return the fewest moves that bring every replica to the target load, as far as the receivers have KV blocks.

    The fullest replica gives first, the emptiest receives first, ties go to the lower rank: every rank that knows the
    loads makes the same plan.
    """
    counts = [load.num_requests for load in loads]
    free = [load.free_blocks for load in loads]
    target = target_load(counts, sizes)
    offered = [min(max(0, count - target), len(load.blocks_needed)) for count, load in zip(counts, loads, strict=True)]
    given = [0] * len(loads)
    moves: list[Move] = []
    while any(given[r] < offered[r] for r in range(len(loads))):
        source = max((r for r in range(len(loads)) if given[r] < offered[r]), key=lambda r: (counts[r], -r))
        index, needed = given[source], loads[source].blocks_needed[given[source]]
        given[source] += 1
        receivers = [r for r in range(len(loads)) if counts[r] < target and free[r] >= needed]
        if receivers:
            destination = min(receivers, key=lambda r: (counts[r], -free[r], r))
            moves.append(Move(source, index, destination))
            counts[source] -= 1
            counts[destination] += 1
            free[destination] -= needed
    return moves


def _padded(count: int, sizes: Sequence[int]) -> int:
    """The batch size that a step of `count` requests is run at."""
    return next((size for size in sizes if size >= count), count)
