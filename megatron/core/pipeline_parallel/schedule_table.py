"""The order in which stages run the micro-batches of a step, and which transfers each beat has: pure functions.

A stage with V chunks runs every micro-batch V times. The unit of work is a ``Task``, the forward or the backward of one
micro-batch through one chunk; it needs the output of the same micro-batch's task one (virtual) stage before it.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def group_sizes(
    num_microbatches: int, microbatch_group_size_per_vp_stage: int, pipeline_size: int = 1
) -> tuple[int, ...]:
    """Micro-batches that run through chunk 0 before the first of them runs through chunk 1, group after group.

    All groups have the given size, and the last one has the remainder. Upstream refuses a remainder of fewer
    micro-batches than stages: its first micro-batch would come back from the last stage too late, and the stages would
    deadlock. Here such a remainder is spread over the other groups.
    """
    num_full, rest = divmod(num_microbatches, microbatch_group_size_per_vp_stage)
    if num_full == 0:
        return (num_microbatches,)
    if rest == 0 or rest >= pipeline_size:
        return (microbatch_group_size_per_vp_stage,) * num_full + ((rest,) if rest else ())
    size, num_larger = divmod(num_microbatches, num_full)
    return (size + 1,) * num_larger + (size,) * (num_full - num_larger)


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int, pipeline_size: int = 1
) -> list[Task]:
    """Return the forward tasks of a rank in order; the k-th backward belongs to the k-th entry.

    The chunks of backwards count from the end. ``pipeline_size``: see ``group_sizes``; with 1, upstream's default, the
    last group has the remainder.
    """
    table, first = [], 0
    for size in group_sizes(num_microbatches, microbatch_group_size_per_vp_stage, pipeline_size):
        table += [Task(first + i, chunk) for chunk in range(num_model_chunks) for i in range(size)]
        first += size
    return table


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int,
    forward_only: bool = False,
    *,
    pipeline_size: int,
    pipeline_rank: int,
) -> tuple[int, bool, int, int]:
    """Number of forward tasks of a rank, whether all are warm-up, and how many are and are not (1F1B).

    Upstream reads size and rank of the pipeline from its global state. ``microbatch_group_size_per_vp_stage`` is that
    of the largest group.
    """
    total = num_microbatches * num_model_chunks
    num_stages_after = pipeline_size - pipeline_rank - 1
    if forward_only:
        num_warmup = total
    elif num_model_chunks == 1:
        num_warmup = num_stages_after
    else:
        # The first backward is that of the last chunk, which sees its first micro-batch after a group in each other
        # chunk; the next stage's forward and backward lie between two tasks that depend on one another.
        num_warmup = 2 * num_stages_after + (num_model_chunks - 1) * microbatch_group_size_per_vp_stage
    num_warmup = min(num_warmup, total)
    return total, num_warmup == total, num_warmup, total - num_warmup


@lru_cache(maxsize=64)
def timetable(
    num_microbatches: int,
    num_model_chunks: int,
    pipeline_size: int,
    microbatch_group_size_per_vp_stage: int,
    forward_only: bool,
) -> tuple[tuple[Step, ...], ...]:
    """Return the steps of every rank in one common order, in which every send meets its receive.

    Time is divided into beats, each with a forward half and a backward half. In each half a rank computes at most one
    task, in the order of its schedule, once its input has arrived in an earlier half. All results of a half are sent at
    its end, and sender and receiver both know this. So every number of micro-batches works that the order of the tasks
    allows, and two ranks have the transfers between them in the same order.
    """
    sizes = group_sizes(num_microbatches, microbatch_group_size_per_vp_stage, pipeline_size)
    table = get_schedule_table(num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage, pipeline_size)
    group_size = max(sizes)
    todo = [
        rank_order(table, num_model_chunks, group_size, forward_only, pipeline_size, rank)
        for rank in range(pipeline_size)
    ]
    place, steps = [0] * pipeline_size, [list[Step]() for _ in todo]
    done: set[tuple[bool, int, Task]] = set()
    while any(at < len(order) for at, order in zip(place, todo, strict=True)):
        num_done = len(done)
        for is_backward in (False, True):
            onward = -1 if is_backward else 1
            computed: list[Task | None] = [None] * pipeline_size
            arrived: list[Task | None] = [None] * pipeline_size
            has_target = [False] * pipeline_size
            for rank, order in enumerate(todo):
                if place[rank] == len(order) or order[place[rank]][0] != is_backward:
                    continue
                task = order[place[rank]][1]
                needed = neighbour(rank, task, -onward, num_model_chunks, pipeline_size)
                if needed is None or (is_backward, *needed) in done:
                    computed[rank] = task
                    target = neighbour(rank, task, onward, num_model_chunks, pipeline_size)
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


def neighbour(rank: int, task: Task, step: int, num_model_chunks: int, pipeline_size: int) -> tuple[int, Task] | None:
    """(rank, task) of the same micro-batch one virtual stage later (``step`` 1) or earlier (-1), None past the ends."""
    turn, rank = divmod(rank + step, pipeline_size)
    chunk = task.chunk + turn
    return (rank, Task(task.microbatch, chunk)) if 0 <= chunk < num_model_chunks else None


def rank_order(
    table: Sequence[Task], num_model_chunks: int, group_size: int, forward_only: bool, pipeline_size: int, rank: int
) -> list[tuple[bool, Task]]:
    """(is_backward, task) of a rank in 1F1B order: warm-up forwards, pairs of both, the backwards that are left."""
    num_microbatches = len(table) // num_model_chunks
    _, _, num_warmup, num_steady = get_pp_rank_microbatches(
        num_microbatches,
        num_model_chunks,
        group_size,
        forward_only,
        pipeline_size=pipeline_size,
        pipeline_rank=rank,
    )
    forwards = [(False, task) for task in table]
    if forward_only:
        return forwards
    backwards = [(True, Task(microbatch, num_model_chunks - 1 - chunk)) for microbatch, chunk in table]
    order = forwards[:num_warmup]
    for pair in zip(forwards[num_warmup:], backwards, strict=False):
        order += pair
    return order + backwards[num_steady:]
