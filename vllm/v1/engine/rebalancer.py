"""Moves requests between the DP replicas of an instance during a long generation, and brings them home at its end.

A step is as slow as the fullest replica: with shared experts all replicas step together, and graphs are padded to one
batch size. When most answers of one replica have ended and those of another have not, moving some evens them out.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist

from vllm.distributed.parallel_state import GroupCoordinator, ParallelState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.move_plan import Load, Move, plan_moves, target_load
from vllm.v1.engine.request_codec import decode, encode
from vllm.v1.request import Request


class Rebalancer:
    """One rank's part. All methods but `forget` are collective over the ranks of the DP group and of the TP group.

    A request belongs to the replica that was asked for it, its home. There its `Request` object waits while a copy, a
    guest, runs elsewhere; a guest may move on. Draws depend on seed and position alone, so a moved request gets the
    tokens it would have got at home. Its KV blocks do not travel: the receiver computes them again from its tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        parallel: ParallelState,
        device: torch.device,
        interval: int,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self.scheduler, self.device = scheduler, device
        self.dp, self.tp = parallel.dp, parallel.tp
        self.interval = interval  # steps until the next round, by which the requests grow
        self.sizes = sizes  # batch sizes that steps are padded to, ascending
        self.num_moves = 0  # over the instance's life
        self._away: dict[int, Request] = {}  # of this home, by key
        self._guests: list[Request] = []  # running here, of another home; finished ones too
        self._next_key = 0
        self._has_moved = False  # any replica's request since all were at home; the same on every rank

    def balance(self) -> bool:
        """Move the surplus of full replicas to empty ones if it is worth it; whether any replica has work left."""
        unfinished = [*self.scheduler.running, *self.scheduler.waiting]
        free = self.scheduler.kv.pool.num_blocks - sum(map(self._blocks_needed, unfinished))
        counts, free_blocks = self._gather([len(unfinished), free]).T.tolist()
        surplus = [count - target_load(counts, self.sizes) for count in counts]
        if max(surplus) > 0:
            offered = self._cheapest(unfinished, surplus[self.dp.rank_in_group])
            needed = [self._blocks_needed(request) for request in offered]
            table = self._gather(needed + [0] * (max(surplus) - len(needed))).tolist()
            loads = [
                Load(count, blocks, tuple(row[: max(0, extra)]))
                for count, blocks, row, extra in zip(counts, free_blocks, table, surplus, strict=True)
            ]
            self._carry_out(plan_moves(loads, self.sizes), offered)
        return sum(counts) > 0

    def bring_home(self) -> None:
        """Return every guest to its home, finished as it is; afterwards no request of this home is away."""
        if not self._has_moved:
            return
        parts = defaultdict(list)
        for guest in self._guests:
            assert guest.home is not None
            parts[guest.home[0]].append(encode(guest))
        for request in decode(self._exchange(parts)):
            self._restore(request)
        assert not self._away, f"{len(self._away)} requests did not come back"
        self.forget()

    def forget(self) -> None:
        """Drop guests and absent requests: the generation has ended or failed."""
        self._away, self._guests, self._has_moved = {}, [], False

    def _carry_out(self, moves: list[Move], offered: list[Request]) -> None:
        if not moves:
            return
        self.num_moves += len(moves)
        self._has_moved = True
        parts = defaultdict(list)
        for move in moves:
            if move.source == self.dp.rank_in_group:
                parts[move.destination].append(encode(self._take_out(offered[move.index])))
        for request in decode(self._exchange(parts)):
            assert request.home is not None
            if request.home[0] == self.dp.rank_in_group:
                request = self._restore(request)
            else:
                self._guests.append(request)
            self.scheduler.add_request(request)

    def _take_out(self, request: Request) -> Request:
        """Take a request out of this replica."""
        self.scheduler.withdraw(request)
        if request.home is None:
            request.home = (self.dp.rank_in_group, self._next_key)
            self._next_key += 1
        if request.home[0] == self.dp.rank_in_group:
            self._away[request.home[1]] = request
        else:
            self._guests.remove(request)
        return request

    def _restore(self, returned: Request) -> Request:
        """Write what a request has become elsewhere into the object that the caller holds; returns that."""
        assert returned.home is not None
        request = self._away.pop(returned.home[1])
        request.token_ids[:] = returned.token_ids
        for name in PROGRESS:
            setattr(request, name, getattr(returned, name))
        return request

    def _cheapest(self, unfinished: list[Request], count: int) -> list[Request]:
        """The `count` requests that lose least by a move: with the fewest tokens in the cache, the youngest first."""
        youngest_first = unfinished[::-1]
        return sorted(youngest_first, key=lambda request: request.num_computed_tokens)[: max(0, count)]

    def _blocks_needed(self, request: Request) -> int:
        """KV blocks that the request will fill by the next round."""
        longest = request.num_prompt_tokens + request.max_tokens
        return -(-min(len(request.token_ids) + self.interval, longest) // self.scheduler.kv.block_size)

    def _gather(self, values: list[int]) -> np.ndarray:
        """int64 [replicas, len(values)]; the first TP rank of a replica speaks for it."""
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        everyone: np.ndarray = self.dp.all_gather(self.tp.all_gather(mine)[0]).cpu().numpy()
        return everyone

    def _exchange(self, parts: dict[int, list[np.ndarray]]) -> np.ndarray:
        """Send int64 words to other replicas; returns those of all replicas for this one, in rank order."""
        sent = [np.concatenate([np.empty(0, np.int64), *parts.get(r, [])]) for r in range(self.dp.world_size)]
        sizes = self.dp.all_gather(torch.tensor([len(part) for part in sent], device=self.device))
        return all_to_all(self.dp, np.concatenate(sent), sizes.tolist(), self.device)


# What changes of a request while it runs, but for its tokens.
PROGRESS = (
    "output_logprobs",
    "output_top",
    "status",
    "finish_reason",
    "stop_reason",
    "num_cached_tokens",
    "num_preemptions",
)


def all_to_all(group: GroupCoordinator, words: np.ndarray, sizes: list[list[int]], device: torch.device) -> np.ndarray:
    """int64 words of every rank for this one; sizes[s][d] words go from rank s to rank d."""
    me = group.rank_in_group
    received_sizes = [row[me] for row in sizes]
    received = torch.empty(sum(received_sizes), dtype=torch.int64, device=device)
    sent = torch.from_numpy(words).to(device)
    dist.all_to_all_single(received, sent, received_sizes, sizes[me], group=group.group)
    result: np.ndarray = received.cpu().numpy()
    return result
