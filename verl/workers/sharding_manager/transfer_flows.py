"""Which rank sends to which: of every set of holders and every set of consumers, in turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

_FEW_RANKS = 24  # of a flow, up to which a loop over them is quicker than numpy

Few: TypeAlias = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True)
class Flow:
    """Consumer i gets what it needs from sources_N[i], itself where it is a holder."""

    sources_N: np.ndarray
    consumers_N: np.ndarray
    receivers_M: np.ndarray  # the consumers that are not their own source
    senders_S: np.ndarray
    copies_S: np.ndarray  # that each of them sends

    @cached_property
    def most_copies(self) -> int:
        """That one rank sends, at least 1."""
        return int(self.copies_S.max(initial=1))

    @cached_property
    def few(self) -> Few | None:
        """(receivers, senders, their copies) where there are few, which are quicker to look at one by one."""
        if len(self.receivers_M) + len(self.senders_S) > _FEW_RANKS:
            return None
        return self.receivers_M.tolist(), self.senders_S.tolist(), self.copies_S.tolist()


class Flows:
    """Who sends to whom: near holders first, and the holders of a fragment in turns, over consumers and fragments."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._turns: dict[tuple[int, ...], int] = {}
        self._made: dict[tuple[tuple[int, ...], tuple[int, ...], int], tuple[int, Flow]] = {}

    def next(self, holders: tuple[int, ...], consumers: tuple[int, ...]) -> tuple[int, Flow]:
        """The flow that begins with the holder whose turn it is, and one of its sources, these in turns too."""
        turn = self._turns.get(holders, 0)
        self._turns[holders] = (turn + 1) % len(holders)
        key = (holders, consumers, turn)
        if key not in self._made:
            flow = self._make(np.array(holders), np.array(consumers), turn)
            self._made[key] = int(flow.sources_N[turn % len(consumers)]), flow
        return self._made[key]

    def _make(self, holders_H: np.ndarray, consumers_N: np.ndarray, turn: int) -> Flow:
        nodes_H, nodes_N = holders_H // self._ranks_per_node, consumers_N // self._ranks_per_node
        first_N, stop_N = np.searchsorted(nodes_H, nodes_N, "left"), np.searchsorted(nodes_H, nodes_N, "right")
        turns_N = np.arange(len(consumers_N)) + turn
        near_N = first_N + turns_N % np.maximum(stop_N - first_N, 1)
        chosen_N = holders_H[np.where(stop_N > first_N, near_N, turns_N % len(holders_H))]
        sources_N = np.where(np.isin(consumers_N, holders_H), consumers_N, chosen_N)
        is_remote_N = sources_N != consumers_N
        senders_S, copies_S = np.unique(sources_N[is_remote_N], return_counts=True)
        return Flow(sources_N, consumers_N, consumers_N[is_remote_N], senders_S, copies_S)
