"""Plans the moves of requests between replicas: pure functions of the replicas' loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A target above this fraction of the largest load is not worth the moves: each costs a prefill of its request.
WORTH = 0.1


@dataclass(frozen=True)
class Load:
    """What one replica holds: unfinished requests, and the KV blocks left when all of them have grown until the next
    round; and the blocks that each request it could give away will need by then, the first to go first.
    """

    num_requests: int
    free_blocks: int
    blocks_needed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Move:
    """Replica `source` gives the `index`-th of the requests it offered to replica `destination`."""

    source: int
    index: int
    destination: int


def target_load(counts: Sequence[int], sizes: Sequence[int] = ()) -> int:
    """The largest number of requests that a replica keeps: max(counts) when moving is not worth it.

    A step costs what its padded batch costs: `sizes`, ascending, are the batch sizes that steps are padded to; without
    them, and beyond the largest, nothing is padded. The target is the least padded size under which all requests fit
    when spread evenly; what a replica holds above it is its surplus.
    """
    largest, even = max(counts), -(-sum(counts) // len(counts))
    target = min(_padded(even, sizes), largest)
    return target if _padded(largest, sizes) - target >= max(1.0, WORTH * largest) else largest


def plan_moves(loads: Sequence[Load], sizes: Sequence[int] = ()) -> list[Move]:
    """Return the fewest moves that bring every replica to the target load, as far as the receivers have KV blocks.

    The fullest replica gives first, the emptiest receives first, ties go to the lower rank: every rank that knows the
    loads makes the same plan.
    """
    counts = [load.num_requests for load in loads]
    free = [load.free_blocks for load in loads]
    target = target_load(counts, sizes)
    offered = [min(max(0, count - target), len(load.blocks_needed)) for count, load in zip(counts, loads, strict=True)]
    given = [0] * len(loads)
    moves: list[Move] = []
    while any(given[r] < offered[r] for r in range(len(loads))):
        source = max((r for r in range(len(loads)) if given[r] < offered[r]), key=lambda r: (counts[r], -r))
        index, needed = given[source], loads[source].blocks_needed[given[source]]
        given[source] += 1
        receivers = [r for r in range(len(loads)) if counts[r] < target and free[r] >= needed]
        if receivers:
            destination = min(receivers, key=lambda r: (counts[r], -free[r], r))
            moves.append(Move(source, index, destination))
            counts[source] -= 1
            counts[destination] += 1
            free[destination] -= needed
    return moves


def _padded(count: int, sizes: Sequence[int]) -> int:
    """The batch size that a step of `count` requests is run at."""
    return next((size for size in sizes if size >= count), count)
