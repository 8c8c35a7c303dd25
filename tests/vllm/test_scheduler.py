"""The scheduler and the block manager under random traffic, without a model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from vllm.config import SchedulerConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 32,
    chunked: bool = True,
    prefix: bool = False,
) -> Scheduler:
    kv = KVCacheManager(num_blocks, block_size, prefix)
    return Scheduler(SchedulerConfig(max_num_seqs, budget, chunked), kv)


def run_step(scheduler: Scheduler, rng: random.Random) -> tuple[SchedulerOutput, list[Request]]:
    step = scheduler.schedule()
    sampling = [
        r for r, n in zip(step.requests, step.num_tokens, strict=True) if r.num_computed_tokens + n == len(r.token_ids)
    ]
    finished = scheduler.update_from_output(step, [rng.randrange(50) for _ in sampling], [-1.0] * len(sampling))
    return step, finished


def check_invariants(scheduler: Scheduler, step: SchedulerOutput) -> None:
    pool, config = scheduler.kv.pool, scheduler.config
    requests = [*scheduler.running, *scheduler.waiting]
    holders = Counter(block for request in requests for block in request.block_ids)
    assert all(pool.ref_count(block) == holders[block] for block in range(pool.num_blocks))
    assert pool.num_free_blocks == pool.num_blocks - len(holders)
    assert step.total_num_tokens <= config.max_num_batched_tokens
    assert len(scheduler.running) <= config.max_num_seqs
    for request in requests:
        assert len(request.block_ids) * scheduler.kv.block_size >= request.num_computed_tokens
        assert len(set(request.block_ids)) == len(request.block_ids)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_leaks_nothing_and_finishes_everything(seed: int, prefix: bool) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=rng.choice([12, 20, 64]), prefix=prefix, chunked=seed % 3 != 0, budget=48)
    pending = [
        Request(
            str(i),
            [rng.randrange(3) for _ in range(rng.randint(1, 25))],
            max_tokens=rng.randint(1, 20),
            stop_ids=frozenset({7}),
            min_tokens=rng.choice([0, 1]),
        )
        for i in range(80)
    ]
    done: list[Request] = []
    everyone = list(pending)
    for _ in range(5000):
        for _ in range(rng.choice([0, 0, 1, 5])):
            if pending:
                scheduler.add_request(pending.pop())
        if not scheduler.has_unfinished:
            if not pending:
                break
            continue
        step, finished = run_step(scheduler, rng)
        assert step.total_num_tokens > 0
        done += finished
        check_invariants(scheduler, step)
    assert sorted(r.request_id for r in done) == sorted(r.request_id for r in everyone)
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks
    for request in done:
        ended = (
            request.token_ids[-1] == 7
            if request.finish_reason == "stop"
            else request.num_output_tokens == request.max_tokens
        )
        assert ended, request.finish_reason


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=2, budget=16)
    for i in range(4):
        scheduler.add_request(Request(str(i), [1] * 4, max_tokens=2))
    order: list[str] = []
    while scheduler.has_unfinished:
        order += [r.request_id for r in run_step(scheduler, random.Random(0))[1]]
    assert order == ["0", "1", "2", "3"]


def test_a_long_prompt_is_cut_to_the_budget() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add_request(Request("long", list(range(20)), max_tokens=1))
    sizes = []
    while scheduler.has_unfinished:
        sizes.append(run_step(scheduler, random.Random(0))[0].num_tokens)
    assert sizes == [[8], [8], [4]]


def test_the_youngest_is_preempted_and_recomputed_with_its_tokens() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, budget=16)
    old, young = (Request(name, [1, 2], max_tokens=6) for name in ("old", "young"))
    scheduler.add_request(old)
    scheduler.add_request(young)
    while not scheduler.num_preemptions:
        run_step(scheduler, random.Random(0))
    kept = list(young.token_ids)
    assert young.num_preemptions == 1 and old.num_preemptions == 0
    while scheduler.has_unfinished:
        run_step(scheduler, random.Random(0))
    assert young.token_ids[: len(kept)] == kept and young.num_output_tokens == 6


def test_who_was_preempted_waits_for_room_for_all_its_tokens() -> None:
    """Not for that of the first of the steps that compute them again: its blocks would be taken before the last."""
    scheduler = make_scheduler(num_blocks=40, block_size=2, max_num_seqs=4, budget=8)
    rows = [Request(str(i), [1, 2, 3, 4], max_tokens=60) for i in range(4)]
    for row in rows:
        scheduler.add_request(row)
    num_computed = 0
    while scheduler.has_unfinished:
        num_computed += run_step(scheduler, random.Random(0))[0].total_num_tokens
    assert scheduler.num_preemptions <= 6
    assert num_computed < 2 * sum(len(row.token_ids) for row in rows)


def with_cache(scheduler: Scheduler, name: str, num_tokens: int) -> Request:
    """A waiting request that has run elsewhere and came with the cache of all its tokens but the last."""
    request = Request(name, list(range(num_tokens)), max_tokens=20)
    request.status = RequestStatus.PREEMPTED
    scheduler.add_request(request)
    assert scheduler.kv.allocate_slots(request, num_tokens - 1) is not None
    request.num_computed_tokens = num_tokens - 1
    return request


def test_a_request_beyond_the_token_budget_takes_no_blocks_of_others() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=8, chunked=False)
    running = Request("running", [1, 2], max_tokens=9)
    scheduler.add_request(running)
    run_step(scheduler, random.Random(0))
    moved = with_cache(scheduler, "moved", 9)
    urgent = Request("urgent", list(range(8)), max_tokens=2, priority=-1)  # one token more than is left
    scheduler.add_request(urgent)
    step = scheduler.schedule()
    assert step.requests == [running] and scheduler.waiting == [urgent, moved]
    assert (len(moved.block_ids), moved.num_computed_tokens, urgent.block_ids) == (2, 8, [])


@pytest.mark.parametrize(
    ("num_tokens", "is_admitted", "kept"),
    [(32, False, [3, 2]), (16, True, [3, 0]), (24, True, [0, 0]), (8, True, [3, 2])],
    ids=["too little in all", "of the least urgent", "of all", "of none"],
)
def test_waiting_requests_give_blocks_where_that_is_enough(num_tokens: int, is_admitted: bool, kept: list[int]) -> None:
    """8 blocks of 4 tokens: one of a running request, 3 and 2 of two waiting ones, so that 2 are free."""
    scheduler = make_scheduler(num_blocks=8, budget=64)
    running = Request("running", [1, 2], max_tokens=2)
    scheduler.add_request(running)
    run_step(scheduler, random.Random(0))
    held = [with_cache(scheduler, "first", 13), with_cache(scheduler, "second", 9)]
    urgent = Request("urgent", list(range(num_tokens)), max_tokens=2, priority=-1)
    scheduler.add_request(urgent)
    scheduler.config = replace(scheduler.config, max_num_seqs=2)  # one more is admitted
    step = scheduler.schedule()
    assert (urgent in step.requests) == is_admitted
    assert [len(request.block_ids) for request in held] == kept


def test_who_came_with_its_cache_keeps_it_while_there_is_no_room() -> None:
    scheduler = make_scheduler(num_blocks=4, budget=64)
    running = Request("running", list(range(10)), max_tokens=2)
    scheduler.add_request(running)
    run_step(scheduler, random.Random(0))
    moved = with_cache(scheduler, "moved", 5)
    assert scheduler.kv.pool.num_free_blocks == 0
    step, finished = run_step(scheduler, random.Random(0))
    assert step.requests == finished == [running] and len(moved.block_ids) == 1
    step, _ = run_step(scheduler, random.Random(0))
    assert step.requests == [moved] and step.num_tokens == [1]  # and not its 5 tokens


def test_shared_prefix_blocks_are_counted_and_survive_their_first_owner() -> None:
    scheduler = make_scheduler(prefix=True)
    prompt = list(range(13))
    first, second = Request("a", prompt, max_tokens=1), Request("b", prompt, max_tokens=9)
    scheduler.add_request(first)
    scheduler.add_request(second)
    step, finished = run_step(scheduler, random.Random(1))
    assert step.num_tokens == [13, 1]  # three full blocks are shared in the very step that computes them
    assert finished == [first] and second.num_cached_tokens == 12
    pool = scheduler.kv.pool
    assert [pool.ref_count(block) for block in second.block_ids] == [1, 1, 1, 1]
    late = Request("c", prompt, max_tokens=1)
    scheduler.add_request(late)
    run_step(scheduler, random.Random(2))
    assert late.num_cached_tokens == 12
    scheduler.kv.reset_prefix_cache()
    forgotten = Request("d", prompt, max_tokens=1)
    scheduler.add_request(forgotten)
    run_step(scheduler, random.Random(3))
    assert forgotten.num_cached_tokens == 0


def test_block_pool_reuses_the_least_recently_freed() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.register(blocks[2], 99)
    assert pool.allocate(1) == [blocks[1]]
    pool.release([blocks[2]])
    assert pool.find(99) == blocks[2]
    assert pool.allocate(2) == [blocks[0], blocks[2]]
    assert pool.find(99) is None


def test_a_pool_without_blocks_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)
