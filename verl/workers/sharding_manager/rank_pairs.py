"""Which rank sends to which: near source ranks first, and the source ranks of a shard in turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

_FEW_RANKS = 24  # up to so many ranks a Python loop is faster than numpy

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
