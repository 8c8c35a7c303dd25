"""Which rank sends to which in which round: near source ranks first, source ranks in turns, rounds that fit buffers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

_FEW_RANKS = 24  # up to so many ranks a Python loop is faster than numpy
_OPEN_ROUNDS = 8

RankLists: TypeAlias = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True)
class RankPairs:
    """The (source, destination) pairs of a transfer; a destination that owns the elements is its own source.

    Letters: D destinations, R receivers (the destinations with another source), S senders (the sources of these).
    """

    sources_D: np.ndarray
    destinations_D: np.ndarray
    receivers_R: np.ndarray
    senders_S: np.ndarray
    copies_S: np.ndarray  # that each of them sends

    @cached_property
    def max_copies(self) -> int:
        """The most copies that one rank sends, at least 1."""
        return int(self.copies_S.max(initial=1))

    @cached_property
    def as_lists(self) -> RankLists | None:
        """(receivers, senders, their copies) if there are few, else None."""
        if len(self.receivers_R) + len(self.senders_S) > _FEW_RANKS:
            return None
        return self.receivers_R.tolist(), self.senders_S.tolist(), self.copies_S.tolist()


class SourceSelector:
    """Selects a source for every destination: on the same node if possible, and each source rank in turn."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._turns: dict[tuple[int, ...], int] = {}
        self._made: dict[tuple[tuple[int, ...], tuple[int, ...], int], tuple[int, RankPairs]] = {}

    def next(self, source_ranks: tuple[int, ...], destinations: tuple[int, ...]) -> tuple[int, RankPairs]:
        """The pairs that begin with the source rank whose turn it is, and one of their sources, also in turns."""
        turn = self._turns.get(source_ranks, 0)
        self._turns[source_ranks] = (turn + 1) % len(source_ranks)
        key = (source_ranks, destinations, turn)
        if key not in self._made:
            pairs = self._make(np.array(source_ranks), np.array(destinations), turn)
            self._made[key] = int(pairs.sources_D[turn % len(destinations)]), pairs
        return self._made[key]

    def _make(self, ranks_H: np.ndarray, destinations_D: np.ndarray, turn: int) -> RankPairs:
        """Pairs of ``destinations_D`` with some of the H ranks that have the elements."""
        nodes_H, nodes_D = ranks_H // self._ranks_per_node, destinations_D // self._ranks_per_node
        first_D, stop_D = np.searchsorted(nodes_H, nodes_D, "left"), np.searchsorted(nodes_H, nodes_D, "right")
        turns_D = np.arange(len(destinations_D)) + turn
        near_D = first_D + turns_D % np.maximum(stop_D - first_D, 1)
        selected_D = ranks_H[np.where(stop_D > first_D, near_D, turns_D % len(ranks_H))]
        sources_D = np.where(np.isin(destinations_D, ranks_H), destinations_D, selected_D)
        is_remote_D = sources_D != destinations_D
        senders_S, copies_S = np.unique(sources_D[is_remote_D], return_counts=True)
        return RankPairs(sources_D, destinations_D, destinations_D[is_remote_D], senders_S, copies_S)


class RoundAssigner:
    """Fills rounds one after the other; the last few stay open for transfers that still fit.

    Args:
        limit: bytes that a rank may send, and may receive, in a round.
    """

    def __init__(self, num_ranks: int, limit: int) -> None:
        self._limit = limit
        self._open = [_Load(num_ranks) for _ in range(_OPEN_ROUNDS)]
        self._first = 0  # number of the first open round
        self._full: dict[int, tuple[int, int]] = {}  # pairs -> (round, bytes): no earlier round has room for so many
        self.num_rounds = 1

    def assign(self, pairs: RankPairs, size: int) -> int:
        """The first open round in which every rank of the pairs has room, a new one if there is none."""
        full, least = self._full.get(id(pairs), (0, 0))
        first = max(0, full - self._first) if size >= least else 0
        lists = pairs.as_lists
        slot = self._find_by_numpy(pairs, size, first) if lists is None else self._find_by_loop(lists, size, first)
        if slot is None:
            slot = _OPEN_ROUNDS - 1
            oldest = self._open.pop(0)
            oldest.clear()
            self._open.append(oldest)
            self._first += 1
        self._open[slot].add(pairs, size)
        number = self._first + slot
        self.num_rounds = max(self.num_rounds, number + 1)
        self._full[id(pairs)] = number, size
        return number

    def _find_by_numpy(self, pairs: RankPairs, size: int, first: int) -> int | None:
        for slot in range(first, _OPEN_ROUNDS):
            load = self._open[slot]
            max_sent = (load.sent_N[pairs.senders_S] + pairs.copies_S * size).max()
            if max_sent <= self._limit and load.received_N[pairs.receivers_R].max() + size <= self._limit:
                return slot
        return None

    def _find_by_loop(self, lists: RankLists, size: int, first: int) -> int | None:
        """One loop without calls, because it runs for millions of transfers."""
        receivers, senders, copies = lists
        limit = self._limit
        for slot in range(first, _OPEN_ROUNDS):
            load = self._open[slot]
            received = load.received
            for rank in receivers:
                if received[rank] + size > limit:
                    break
            else:
                sent = load.sent
                for rank, count in zip(senders, copies, strict=True):
                    if sent[rank] + count * size > limit:
                        break
                else:
                    return slot
        return None


class _Load:
    """Bytes that each of N ranks sends and receives in one round: arrays for loops, and views of them for numpy."""

    def __init__(self, num_ranks: int) -> None:
        self.sent, self.received = (array("q", bytes(8 * num_ranks)) for _ in range(2))
        self.sent_N, self.received_N = (np.frombuffer(load, dtype=np.int64) for load in (self.sent, self.received))

    def add(self, pairs: RankPairs, size: int) -> None:
        """Add the copies, of ``size`` bytes each, that the pairs send and receive."""
        if pairs.as_lists is None:
            self.sent_N[pairs.senders_S] += pairs.copies_S * size
            self.received_N[pairs.receivers_R] += size
            return
        receivers, senders, copies = pairs.as_lists
        for rank in receivers:
            self.received[rank] += size
        for rank, count in zip(senders, copies, strict=True):
            self.sent[rank] += count * size

    def clear(self) -> None:
        self.sent_N[:] = 0
        self.received_N[:] = 0
