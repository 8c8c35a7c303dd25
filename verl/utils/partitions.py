"""Partitions rows to nearly equal total lengths, over data-parallel ranks and over micro-batches."""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

from verl.utils.errors import BatchError

# One partition under construction: (minus its tokens, lowest row, its rows); the natural order is by falling sum.
_Part = tuple[int, int, list[int]]


@dataclass(frozen=True)
class RowTokens:
    """The packed tokens of rows: ``own`` of each, and its ``prompt`` once for all rows with the same ``first`` row."""

    own: Sequence[int]
    prompt: Sequence[int]
    first: Sequence[int]

    def of(self, rows: Sequence[int]) -> int:
        """Packed tokens of ``rows`` in one micro-batch."""
        prompts = {self.first[row]: self.prompt[row] for row in rows}
        return sum(self.own[row] for row in rows) + sum(prompts.values())

    def groups(self) -> list[list[int]]:
        """The rows of each prompt."""
        rows = sorted(range(len(self.first)), key=self.first.__getitem__)
        return [list(group) for _, group in groupby(rows, key=self.first.__getitem__)]


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
    prompt_lengths: Sequence[int] = (),
) -> list[int]:
    """Returns an order of the rows in which each of ``num_ranks`` equal parts is one rank's share of each mini-batch.

    A mini-batch is the next ``rows_per_mini_batch`` rows of the batch (with a seed: of the shuffled batch), whatever
    the number of ranks: an update learns from the same rows in every layout. Its rows are assigned to ranks by length,
    or in order without ``balance``. Groups of ``group_size`` rows, one after another, share a prompt, of
    ``prompt_lengths`` tokens in each row, which a rank computes once. They stay together, whole or in equal parts, as
    far as this leaves the rank with most tokens no more to compute; shuffled rows do not.
    """
    order = list(range(len(seqlen_list)))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(order)
    prompts = prompt_lengths or [0] * len(order)
    own = [length - prompt for length, prompt in zip(seqlen_list, prompts, strict=True)]
    tokens = RowTokens(own, prompts, [row - row % group_size for row in range(len(order))])
    largest = gcd(group_size, rows_per_mini_batch // num_ranks) if shuffle_seed is None else 1
    ways = []
    for size in (size for size in range(largest, 0, -1) if largest % size == 0):
        units = [order[first : first + size] for first in range(0, len(order), size)]
        lengths = [tokens.of(unit) for unit in units]
        assigned = _assigned(lengths, num_ranks, rows_per_mini_batch // size, balance)
        ways.append([[[row for index in part for row in units[index]] for part in parts] for parts in assigned])
    best = min(ways, key=lambda way: sum(max(map(tokens.of, parts)) for parts in way))
    return [row for shares in zip(*best, strict=True) for share in shares for row in share]


def _assigned(lengths: Sequence[int], num_ranks: int, rows_per_mini_batch: int, balance: bool) -> list[list[list[int]]]:
    """The rows of each rank in each mini-batch."""
    found = []
    for first in range(0, len(lengths), rows_per_mini_batch):
        of_mini_batch = lengths[first : first + rows_per_mini_batch]
        size = len(of_mini_batch) // num_ranks
        parts = [list(range(rank * size, (rank + 1) * size)) for rank in range(num_ranks)]
        if balance:
            parts = get_seqlen_balanced_partitions(of_mini_batch, num_ranks, equal_size=True)
        found.append([[first + row for row in part] for part in parts])
    return found


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


def units_of_rows(tokens: RowTokens, num_rows: int, max_tokens: int | None) -> tuple[list[list[int]], list[list[int]]]:
    """Returns units of rows that stay together, few for each prompt, and the units of each micro-batch.

    A micro-batch has ``num_rows`` rows or, if there is such a limit, up to ``max_tokens`` packed tokens.
    """
    groups = tokens.groups()
    if max_tokens is not None:
        units = [
            [group[index] for index in part]
            for group in groups
            for part in partitions_within([tokens.own[row] for row in group], max_tokens - tokens.prompt[group[0]])
        ]
        return units, partitions_within([tokens.of(unit) for unit in units], max_tokens)
    size, count = min(num_rows, max(map(len, groups), default=1)), len(tokens.own) // num_rows
    is_even = len(tokens.own) % num_rows == 0 and num_rows % size == 0 and not any(len(x) % size for x in groups)
    if count and is_even:
        units = [
            [group[index] for index in part]
            for group in groups
            for part in get_seqlen_balanced_partitions([tokens.own[row] for row in group], len(group) // size, True)
        ]
        return units, get_seqlen_balanced_partitions([tokens.of(unit) for unit in units], count, equal_size=True)
    rows = [row for group in groups for row in group]
    units = [rows[first : first + num_rows] for first in range(0, len(rows), num_rows)]
    return units, [[index] for index in range(len(units))]


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
