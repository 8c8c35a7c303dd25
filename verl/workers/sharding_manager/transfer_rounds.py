"""Assigns transfers to rounds, in none of which a rank sends or receives more than its buffers hold."""

from __future__ import annotations

from array import array

import numpy as np

from verl.workers.sharding_manager.rank_pairs import RankLists, RankPairs

_OPEN_ROUNDS = 8


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
        """Empty it for a new round."""
        self.sent_N[:] = 0
        self.received_N[:] = 0
