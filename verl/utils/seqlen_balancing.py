"""Rows to partitions of nearly equal total length."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Indices of ``seqlen_list`` in ``k_partitions`` groups whose length sums are close (Karmarkar-Karp differencing).

    With ``equal_size`` every group has the same number of indices. Deterministic; indices ascend within a group.
    Raises ValueError when there are fewer rows than partitions or, with ``equal_size``, when they do not divide.
    """
    count = len(seqlen_list)
    if count < k_partitions:
        raise ValueError(f"{count} sequences cannot fill {k_partitions} partitions")
    if equal_size and count % k_partitions:
        raise ValueError(f"{count} sequences do not divide over {k_partitions} partitions of equal size")
    order = sorted(range(count), key=lambda i: (seqlen_list[i], i))
    step = k_partitions if equal_size else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, count, step):
        sums = [(seqlen_list[i], [i]) for i in order[start : start + step]]
        sums += [(0, [])] * (k_partitions - len(sums))
        _push(heap, sums, start)
    while len(heap) > 1:
        _, first_id, left = heapq.heappop(heap)
        _, second_id, right = heapq.heappop(heap)
        # The largest sums of one meet the smallest of the other.
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        _push(heap, merged, min(first_id, second_id))
    partitions = [sorted(indices) for _, indices in heap[0][2]]
    return partitions if equal_size else _fill_empty(partitions, seqlen_list)


def _push(heap: list, sums: list[tuple[int, list[int]]], tie: int) -> None:
    ordered = sorted(sums, key=lambda entry: (-entry[0], entry[1]))
    heapq.heappush(heap, (ordered[-1][0] - ordered[0][0], tie, ordered))


def _fill_empty(partitions: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    for group in partitions:
        if not group:
            donor = max((g for g in partitions if len(g) > 1), key=lambda g: sum(lengths[i] for i in g))
            group.append(donor.pop())
    return partitions
