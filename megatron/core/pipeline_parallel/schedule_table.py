"""The order in which stages run the micro-batches of a step, and which transfers each beat has: pure functions.

A stage with V chunks runs every micro-batch V times. The unit of work is a ``Task``, the forward or the backward of one
micro-batch through one chunk; it needs the output of the same micro-batch's task one (virtual) stage before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Task(NamedTuple):
    """One micro-batch through one chunk of a stage."""

    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Step:
    """The work of one rank in one half of a beat; every field may be empty, but not all of them.

    is_backward: which half · task: what it computes · sends: whether the result goes to a neighbour · receives: the
    task of this rank whose input (backward: output gradient) a neighbour has computed in the same half and sends now.
    """

    is_backward: bool
    task: Task | None
    sends: bool
    receives: Task | None


def group_sizes(num_microbatches: int, num_stages: int) -> tuple[int, ...]:
    """Micro-batches that run through chunk 0 before the first of them runs through chunk 1, group after group.

    A group has as many micro-batches as there are stages, upstream's default. Upstream refuses a remainder: its first
    micro-batch would come back from the last stage too late, and the stages would deadlock. Here it is spread over the
    groups.
    """
    num_groups = max(1, num_microbatches // num_stages)
    size, num_larger = divmod(num_microbatches, num_groups)
    return (size + 1,) * num_larger + (size,) * (num_groups - num_larger)


def get_schedule_table(num_microbatches: int, num_chunks: int, num_stages: int) -> list[Task]:
    """Return the forward tasks of a rank in order; the k-th backward belongs to the k-th entry.

    The chunks of backwards count from the end.
    """
    table, first = [], 0
    for size in group_sizes(num_microbatches, num_stages):
        table += [Task(first + i, chunk) for chunk in range(num_chunks) for i in range(size)]
        first += size
    return table


@lru_cache(maxsize=64)
def timetable(
    num_microbatches: int, num_chunks: int, num_stages: int, forward_only: bool
) -> tuple[tuple[Step, ...], ...]:
    """Return the steps of every rank in one common order, in which every send meets its receive.

    Time is divided into beats, each with a forward half and a backward half. In each half a rank computes at most one
    task, in the order of its schedule, once its input has arrived in an earlier half. All results of a half are sent at
    its end, and sender and receiver both know this. So every number of micro-batches works that the order of the tasks
    allows, and two ranks have the transfers between them in the same order.
    """
    todo = [rank_order(num_microbatches, num_chunks, num_stages, rank, forward_only) for rank in range(num_stages)]
    place, steps = [0] * num_stages, [list[Step]() for _ in todo]
    done: set[tuple[bool, int, Task]] = set()
    while any(at < len(order) for at, order in zip(place, todo, strict=True)):
        num_done = len(done)
        for is_backward in (False, True):
            onward = -1 if is_backward else 1
            computed: list[Task | None] = [None] * num_stages
            arrived: list[Task | None] = [None] * num_stages
            has_target = [False] * num_stages
            for rank, order in enumerate(todo):
                if place[rank] == len(order) or order[place[rank]][0] != is_backward:
                    continue
                task = order[place[rank]][1]
                needed = neighbour(rank, task, -onward, num_chunks, num_stages)
                if needed is None or (is_backward, *needed) in done:
                    computed[rank] = task
                    target = neighbour(rank, task, onward, num_chunks, num_stages)
                    if target is not None:
                        arrived[target[0]], has_target[rank] = target[1], True
            for rank, result in enumerate(computed):
                if result is not None or arrived[rank] is not None:
                    steps[rank].append(Step(is_backward, result, has_target[rank], arrived[rank]))
                if result is not None:
                    place[rank] += 1
                    done.add((is_backward, rank, result))
        assert len(done) > num_done, f"stages wait for one another at {place} of {[len(order) for order in todo]}"
    return tuple(map(tuple, steps))


def neighbour(rank: int, task: Task, step: int, num_chunks: int, num_stages: int) -> tuple[int, Task] | None:
    """(rank, task) of the same micro-batch one virtual stage later (``step`` 1) or earlier (-1), None past the ends."""
    turn, rank = divmod(rank + step, num_stages)
    chunk = task.chunk + turn
    return (rank, Task(task.microbatch, chunk)) if 0 <= chunk < num_chunks else None


def rank_order(
    num_microbatches: int, num_chunks: int, num_stages: int, rank: int, forward_only: bool
) -> list[tuple[bool, Task]]:
    """(is_backward, task) of a rank in 1F1B order: warm-up forwards, pairs of both, the backwards that are left."""
    table = get_schedule_table(num_microbatches, num_chunks, num_stages)
    forwards = [(False, task) for task in table]
    if forward_only:
        return forwards
    backwards = [(True, Task(microbatch, num_chunks - 1 - chunk)) for microbatch, chunk in table]
    num_warmup = num_stages - rank - 1
    if num_chunks > 1:
        # The first backward is that of the last chunk, which sees its first micro-batch after a group in each other
        # chunk; the next stage's forward and backward lie between two tasks that depend on one another.
        num_warmup = 2 * num_warmup + (num_chunks - 1) * max(group_sizes(num_microbatches, num_stages))
    order = forwards[:num_warmup]
    for pair in zip(forwards[num_warmup:], backwards, strict=False):
        order += pair
    return order + backwards[len(forwards[num_warmup:]) :]
