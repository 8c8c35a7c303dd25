"""Rounds of a transfer, in none of which a rank sends or receives more than its buffers hold."""

from __future__ import annotations

from array import array

import numpy as np

from verl.workers.sharding_manager.transfer_flows import Few, Flow

_OPEN_ROUNDS = 8


class Rounds:
    """The bytes that every rank sends and receives in the last rounds, which are still open."""

    def __init__(self, num_ranks: int, limit: int) -> None:
        self._limit = limit
        self._open = [_Load(num_ranks) for _ in range(_OPEN_ROUNDS)]
        self._first = 0  # open round
        self._full: dict[int, tuple[int, int]] = {}  # flow -> no round before this one has room for so many bytes
        self.count = 1

    def place(self, flow: Flow, size: int) -> int:
        """The first open round in which every rank of the flow has room, a new one if there is none."""
        full, least = self._full.get(id(flow), (0, 0))
        begin = max(0, full - self._first) if size >= least else 0
        slot = self._slot_for_few(flow.few, size, begin) if flow.few is not None else self._slot(flow, size, begin)
        if slot is None:
            slot = _OPEN_ROUNDS - 1
            oldest = self._open.pop(0)
            oldest.clear()
            self._open.append(oldest)
            self._first += 1
        self._open[slot].add(flow, size)
        number = self._first + slot
        self.count = max(self.count, number + 1)
        self._full[id(flow)] = number, size
        return number

    def _slot(self, flow: Flow, size: int, begin: int) -> int | None:
        for slot in range(begin, _OPEN_ROUNDS):
            load = self._open[slot]
            most_sent = (load.sent_N[flow.senders_S] + flow.copies_S * size).max()
            if most_sent <= self._limit and load.received_N[flow.receivers_M].max() + size <= self._limit:
                return slot
        return None

    def _slot_for_few(self, few: Few, size: int, begin: int) -> int | None:
        """One loop, as it is run for millions of routes."""
        receivers, senders, copies = few
        limit = self._limit
        for slot in range(begin, _OPEN_ROUNDS):
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
    """Bytes that every rank sends and receives in one round: arrays for single ranks, and for many at once."""

    def __init__(self, num_ranks: int) -> None:
        self.sent, self.received = (array("q", bytes(8 * num_ranks)) for _ in range(2))
        self.sent_N, self.received_N = (np.frombuffer(load, dtype=np.int64) for load in (self.sent, self.received))

    def add(self, flow: Flow, size: int) -> None:
        """The flow's copies of ``size`` bytes."""
        if flow.few is None:
            self.sent_N[flow.senders_S] += flow.copies_S * size
            self.received_N[flow.receivers_M] += size
            return
        receivers, senders, copies = flow.few
        for rank in receivers:
            self.received[rank] += size
        for rank, count in zip(senders, copies, strict=True):
            self.sent[rank] += count * size

    def clear(self) -> None:
        """For another round."""
        self.sent_N[:] = 0
        self.received_N[:] = 0
