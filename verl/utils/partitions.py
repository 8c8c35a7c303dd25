"""Partitions rows to nearly equal total lengths, over data-parallel ranks and over micro-batches."""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Sequence

from verl.utils.errors import BatchError

# One partition under construction: (minus its tokens, lowest row, its rows); the natural order is by falling sum.
_Part = tuple[int, int, list[int]]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Indices of ``seqlen_list`` in ``k_partitions`` groups whose length sums are close (Karmarkar-Karp differencing).

    With ``equal_size`` every group has the same number of indices. Deterministic; indices ascend within a group.
    Raises ValueError when there are fewer rows than partitions or, with ``equal_size``, when they do not divide.
    """
    count = len(seqlen_list)
    if count < k_partitions:
        raise BatchError(f"{count} sequences cannot fill {k_partitions} partitions")
    if equal_size and count % k_partitions:
        raise BatchError(f"{count} sequences do not divide over {k_partitions} partitions of equal size")
    order = sorted(range(count), key=lambda i: (-seqlen_list[i], i))
    step = k_partitions if equal_size else 1
    # A candidate solution lists its partitions by falling sum; empty ones, which come last, are left out.
    heap: list[tuple[int, int, list[_Part]]] = []
    for start in range(0, count, step):
        _push(heap, [(-seqlen_list[i], i, [i]) for i in order[start : start + step]], start, k_partitions)
    while len(heap) > 1:
        _, first_id, left = heapq.heappop(heap)
        _, second_id, right = heapq.heappop(heap)
        _push(heap, _merge(left, right, k_partitions), min(first_id, second_id), k_partitions)
    partitions = [sorted(rows) for _, _, rows in heap[0][2]]
    partitions += [[] for _ in range(k_partitions - len(partitions))]
    return partitions if equal_size else _fill_empty(partitions, seqlen_list)


def balanced_order(
    seqlen_list: Sequence[int],
    num_ranks: int,
    rows_per_mini_batch: int,
    *,
    balance: bool = True,
    shuffle_seed: int | None = None,
    group_size: int = 1,
) -> list[int]:
    """Returns an order of the rows in which each of ``num_ranks`` equal parts is one rank's share of each mini-batch.

    A mini-batch is the next ``rows_per_mini_batch`` rows of the batch (with a seed: of the shuffled batch), whatever
    the number of ranks: an update learns from the same rows in every layout. Its rows are assigned to ranks by length,
    or in order without ``balance``. Groups of ``group_size`` rows, one after another, stay together where the groups of
    a mini-batch divide over the ranks and nothing is shuffled.
    """
    if group_size > 1 and shuffle_seed is None and rows_per_mini_batch % (group_size * num_ranks) == 0:
        firsts = range(0, len(seqlen_list), group_size)
        sums = [sum(seqlen_list[first : first + group_size]) for first in firsts]
        groups = balanced_order(sums, num_ranks, rows_per_mini_batch // group_size, balance=balance)
        return [firsts[group] + row for group in groups for row in range(group_size)]
    order = list(range(len(seqlen_list)))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(order)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for first in range(0, len(order), rows_per_mini_batch):
        lengths = [seqlen_list[row] for row in order[first : first + rows_per_mini_batch]]
        if balance:
            parts = get_seqlen_balanced_partitions(lengths, num_ranks, equal_size=True)
        else:
            size = len(lengths) // num_ranks
            parts = [list(range(rank * size, (rank + 1) * size)) for rank in range(num_ranks)]
        for share, part in zip(shares, parts, strict=True):
            share.extend(order[first + row] for row in part)
    return [row for share in shares for row in share]


def partitions_within(seqlen_list: Sequence[int], max_sum: int) -> list[list[int]]:
    """Returns few partitions of balanced sums, none above ``max_sum`` except those of a single longer row.

    Best-fit decreasing finds how many are needed; if balancing that many breaks the limit, its partitions are used.
    """
    if not seqlen_list:
        return []
    rooms: list[int] = []  # free tokens of each open partition, ascending
    names: list[int] = []  # the partition that each entry of ``rooms`` belongs to
    fitted: list[list[int]] = []
    for row in sorted(range(len(seqlen_list)), key=lambda i: (-seqlen_list[i], i)):
        index = bisect.bisect_left(rooms, seqlen_list[row])
        if index == len(rooms):
            fitted.append([row])
            room, name = max_sum - seqlen_list[row], len(fitted) - 1
        else:
            name, room = names.pop(index), rooms.pop(index) - seqlen_list[row]
            fitted[name].append(row)
        index = bisect.bisect_left(rooms, room)
        rooms.insert(index, room)
        names.insert(index, name)
    balanced = get_seqlen_balanced_partitions(seqlen_list, len(fitted), equal_size=False)
    is_within = all(len(part) == 1 or sum(seqlen_list[row] for row in part) <= max_sum for part in balanced)
    return balanced if is_within else [sorted(part) for part in fitted]


def split_to(partitions: Sequence[list[int]], seqlen_list: Sequence[int], count: int) -> list[list[int]]:
    """Splits the heaviest partition in two until there are ``count``, or until each is a single row."""
    single = [part for part in partitions if len(part) == 1]
    heap = [(-sum(seqlen_list[row] for row in part), part) for part in partitions if len(part) > 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(single) < count:
        _, part = heapq.heappop(heap)
        lengths = [seqlen_list[row] for row in part]
        for rows in get_seqlen_balanced_partitions(lengths, 2, equal_size=False):
            half = [part[row] for row in rows]
            if len(half) == 1:
                single.append(half)
            else:
                heapq.heappush(heap, (-sum(seqlen_list[row] for row in half), half))
    return single + [part for _, part in heap]


def _merge(left: list[_Part], right: list[_Part], num_partitions: int) -> list[_Part]:
    """Joins the largest sums of one with the smallest of the other; with room for all, none are joined."""
    num_alone = max(num_partitions - len(right), 0)  # the first of ``left`` meet empty partitions of ``right``
    met = [
        (a + b, min(first, second), [*rows, *others])
        for (a, first, rows), (b, second, others) in zip(left[num_alone:], reversed(right), strict=False)
    ]
    merged = left[:num_alone] + met + right[: len(right) - len(met)]
    merged.sort()
    return merged


def _push(heap: list[tuple[int, int, list[_Part]]], parts: list[_Part], tie: int, num_partitions: int) -> None:
    smallest = parts[-1][0] if len(parts) == num_partitions else 0
    heapq.heappush(heap, (parts[0][0] - smallest, tie, parts))


def _fill_empty(partitions: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    for group in partitions:
        if not group:
            donor = max((g for g in partitions if len(g) > 1), key=lambda g: sum(lengths[i] for i in g))
            group.append(donor.pop())
    return partitions
