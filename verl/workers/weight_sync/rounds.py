"""Which rank sends to which in which round: near source ranks first, source ranks in turns, rounds that fit buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

_OPEN_ROUNDS = 8


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
    def receivers(self) -> list[int]:
        return self.receivers_R.tolist()

    @cached_property
    def senders(self) -> list[tuple[int, int]]:
        """(rank, its copies) of every sender."""
        return list(zip(self.senders_S.tolist(), self.copies_S.tolist(), strict=True))


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
        self._limit, self._num_ranks = limit, num_ranks
        self._sent, self._received = ([[0] * num_ranks for _ in range(_OPEN_ROUNDS)] for _ in range(2))
        self._first = 0  # number of the first open round
        self._full: dict[int, tuple[int, int]] = {}  # pairs -> (round, bytes): no earlier round has room for so many
        self.num_rounds = 1

    def assign(self, pairs: RankPairs, size: int) -> int:
        """The first open round in which every rank of the pairs has room, a new one if there is none."""
        full, least = self._full.get(id(pairs), (0, 0))
        slot = self._find(pairs, size, max(0, full - self._first) if size >= least else 0)
        if slot is None:
            slot = _OPEN_ROUNDS - 1
            for loads in (self._sent, self._received):
                del loads[0]
                loads.append([0] * self._num_ranks)
            self._first += 1
        sent, received = self._sent[slot], self._received[slot]
        for rank in pairs.receivers:
            received[rank] += size
        for rank, count in pairs.senders:
            sent[rank] += count * size
        number = self._first + slot
        self.num_rounds = max(self.num_rounds, number + 1)
        self._full[id(pairs)] = number, size
        return number

    def _find(self, pairs: RankPairs, size: int, first: int) -> int | None:
        """Loops without calls, because they run for millions of transfers."""
        limit, senders = self._limit, pairs.senders
        for slot in range(first, _OPEN_ROUNDS):
            received = self._received[slot]
            for rank in pairs.receivers:
                if received[rank] + size > limit:
                    break
            else:
                sent = self._sent[slot]
                for rank, count in senders:
                    if sent[rank] + count * size > limit:
                        break
                else:
                    return slot
        return None
