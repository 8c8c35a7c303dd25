"""The steps of a generation whose lengths are given, from the engine's own scheduler alone."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

from vllm.config import SchedulerConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


@dataclass(frozen=True)
class Workload:
    """The generation of one replica: its rows, its cache and its scheduler.

    num_prompts: rows, those of one prompt together · samples_per_prompt: rows that have the same prompt ·
    prompt_length, response_length: tokens of every row · num_blocks, block_size, shares_prefixes: the KV cache ·
    token: the token that every row samples.
    """

    num_prompts: int
    samples_per_prompt: int
    prompt_length: int
    response_length: int
    num_blocks: int
    block_size: int
    shares_prefixes: bool
    scheduler: SchedulerConfig
    token: int

    def prompt(self, row: int) -> list[int]:
        """Token ids; different prompts start with different tokens."""
        return [row // self.samples_per_prompt + 1, *[self.token] * (self.prompt_length - 1)]


@dataclass(frozen=True)
class Row:
    """A sequence as it was when a step was scheduled: its tokens and blocks, and the tokens that the step computes, of
    which ``num_drafts`` are drafts.
    """

    row: int
    num_tokens: int
    num_computed: int
    num_new: int
    block_ids: tuple[int, ...]
    num_drafts: int = 0


@dataclass(frozen=True)
class Step:
    """A scheduled step; `block_copies` as in ``SchedulerOutput``."""

    rows: tuple[Row, ...]
    block_copies: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_new for row in self.rows)

    def with_drafts(self, num_drafts: int, max_tokens: int) -> Step:
        """This decode step with the last tokens of every row as drafts, at most ``num_drafts`` of each and so many that
        the step has ``max_tokens``; the cache is as full as without them.
        """
        rows, room = [], max(0, max_tokens - len(self.rows))
        for row in self.rows:
            count = min(num_drafts, room)
            room -= count
            tokens, computed = row.num_tokens - count, row.num_computed - count
            changed = replace(row, num_tokens=tokens, num_computed=computed, num_new=1 + count, num_drafts=count)
            rows.append(changed)
        return replace(self, rows=tuple(rows))


@dataclass(frozen=True)
class Steps:
    """The numbers of steps, and the largest step of each kind by new tokens and then by context (None without any).

    A decode step brings one token of every sequence, all others are prefill steps. num_computed: tokens of all steps.
    """

    num_prefill: int
    num_decode: int
    num_computed: int
    num_preemptions: int
    prefill: Step | None
    decode: Step | None


@lru_cache(maxsize=16)
def count_steps(load: Workload) -> Steps:
    """Run the scheduler to the end of every row, without computing anything.

    Decode steps that are like the one before are counted and not scheduled; the result is the same. With a small cache
    a generation of 32,768 tokens has hundreds of thousands of them, and some hundred that differ.
    """
    kv = KVCacheManager(load.num_blocks, load.block_size, load.shares_prefixes)
    scheduler = Scheduler(load.scheduler, kv)
    for row in range(load.num_prompts):
        scheduler.add_request(Request(str(row), load.prompt(row), max_tokens=load.response_length))
    largest: dict[bool, tuple[tuple[int, int], Step]] = {}
    counts, num_computed = {True: 0, False: 0}, 0
    while scheduler.has_unfinished:
        before = list(scheduler.running), scheduler.num_preemptions
        step = scheduler.schedule()
        is_decode = step.is_decode_only
        counts[is_decode] += 1
        num_computed += step.total_num_tokens
        context = sum(request.num_computed_tokens for request in step.requests)
        size = (step.total_num_tokens, context + step.total_num_tokens)
        if is_decode not in largest or size > largest[is_decode][0]:
            largest[is_decode] = size, _kept(step)
        _compute(scheduler, step, load.token)
        is_like_before = step.requests == before[0] == scheduler.running and scheduler.num_preemptions == before[1]
        if is_decode and is_like_before:
            num_alike = _steps_alike(scheduler, load)
            _advance(scheduler, num_alike, load.token)
            counts[True] += num_alike
            num_computed += num_alike * len(scheduler.running)
    prefill, decode = (largest[kind][1] if kind in largest else None for kind in (False, True))
    return Steps(counts[False], counts[True], num_computed, scheduler.num_preemptions, prefill, decode)


def _compute(scheduler: Scheduler, step: SchedulerOutput, token: int) -> None:
    num_sampled = sum(
        request.num_computed_tokens + num_new == len(request.token_ids)
        for request, num_new in zip(step.requests, step.num_tokens, strict=True)
    )
    scheduler.update_from_output(step, [token] * num_sampled, [0.0] * num_sampled)


def _steps_alike(scheduler: Scheduler, load: Workload) -> int:
    """How many decode steps certainly follow that give every running row a token and do nothing else.

    The scheduler runs the last such step, which has the most context. A row that was not admitted into the step before
    goes on waiting, because free blocks only become fewer, unless shared prefixes let it need fewer of its own.
    """
    running = scheduler.running
    if scheduler.waiting and load.shares_prefixes:
        return 0
    most = min(load.response_length - request.num_output_tokens for request in running) - 1
    free = scheduler.kv.pool.num_free_blocks

    def has_room(num_steps: int) -> bool:
        return sum(scheduler.kv.blocks_missing(request, num_steps) for request in running) <= free

    if not has_room(most):
        most = bisect_left(range(most), True, key=lambda num_steps: not has_room(num_steps)) - 1
    return max(0, most - 1)


def _advance(scheduler: Scheduler, num_steps: int, token: int) -> None:
    """Advance the running rows by so many decode steps."""
    if num_steps == 0:
        return
    for request in scheduler.running:
        request.token_ids += [token] * (num_steps - 1)
        new_blocks = scheduler.kv.allocate_slots(request, num_steps)
        assert new_blocks is not None, "there is room"
        request.token_ids.append(token)
        request.output_logprobs += [0.0] * num_steps
        request.num_computed_tokens += num_steps
    scheduler.kv.finish_step()


def _kept(step: SchedulerOutput) -> Step:
    rows = []
    for request, num_new in zip(step.requests, step.num_tokens, strict=True):
        tokens, blocks = len(request.token_ids), tuple(request.block_ids)
        rows.append(Row(int(request.request_id), tokens, request.num_computed_tokens, num_new, blocks))
    return Step(tuple(rows), tuple(step.block_copies))
