"""Requests that move between replicas end as if they had stayed, all of them at home, and the steps are fewer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.launcher import run_ranks
from tests.vllm.capturing_platform import DEVICE as CAPTURING
from tests.vllm.test_scheduler import check_invariants, make_scheduler
from tests.vllm.text_model import write_text_checkpoint
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.rebalancer import Load, Move, exchange_objects, plan_moves, target_load
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.extras import SamplingExtras

PLENTY = 10**6


def loads_of(counts: list[int], free: int = PLENTY, need: int = 1) -> list[Load]:
    return [Load(count, free, (need,) * count) for count in counts]


def after(counts: list[int], moves: list[Move]) -> list[int]:
    counts = list(counts)
    for move in moves:
        counts[move.source] -= 1
        counts[move.destination] += 1
    return counts


@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8, 16, 32), (4, 24)])
def test_a_plan_reaches_the_smallest_batch_with_the_fewest_moves(sizes: tuple[int, ...]) -> None:
    for seed in range(40):
        check_plan(seed, sizes)


def check_plan(seed: int, sizes: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    counts = [rng.choice([0, 1, rng.randint(0, 40)]) for _ in range(rng.randint(1, 9))]
    moves = plan_moves(loads_of(counts), sizes)
    target = target_load(counts, sizes)
    assert max(after(counts, moves)) <= target <= max(counts) and sum(after(counts, moves)) == sum(counts)
    assert len(moves) == sum(max(0, count - target) for count in counts)
    assert len({(move.source, move.index) for move in moves}) == len(moves)
    assert all(counts[move.source] > target > counts[move.destination] for move in moves)
    padded = [next((size for size in sizes if size >= n), n) for n in (target, -(-sum(counts) // len(counts)))]
    if moves:  # nothing below can be reached: the target pads to what an even spread pads to
        assert padded[0] == padded[1] < max(counts)
        assert plan_moves(loads_of(after(counts, moves)), sizes) == []


def test_small_gains_and_full_receivers_move_nothing() -> None:
    assert plan_moves(loads_of([40, 39, 38, 37])) == []
    assert plan_moves(loads_of([8, 5, 5]), sizes=(4, 8)) == []  # padded to 8 all the same
    assert plan_moves(loads_of([0, 0])) == plan_moves(loads_of([1, 0])) == []
    assert plan_moves([Load(8, 0, (3,) * 8), Load(0, 2)]) == []
    assert plan_moves([Load(8, 0, (9, 2, 2, 2)), Load(0, 4)]) == [Move(0, 1, 1), Move(0, 2, 1)]
    assert plan_moves([Load(6, 0, (1,) * 6), Load(6, 0, (1,) * 6), Load(0, 99)]) == [
        Move(0, 0, 2),
        Move(1, 0, 2),
        Move(0, 1, 2),
        Move(1, 1, 2),
    ]


def test_a_request_survives_an_exchange() -> None:
    first = Request(
        "a",
        [1, 2, 3],
        max_tokens=9,
        seed=2**64 - 5,
        temperature=0.1,
        top_k=-1,
        top_p=1 / 3,
        min_tokens=2,
        stop_ids=frozenset({7, 5}),
        num_top_logprobs=2,
        num_prompt_logprobs=1,
        extras=SamplingExtras(
            min_p=0.1,
            repetition_penalty=1 / 3,
            logit_bias=((3, -0.7), (9, 100.0)),
            allowed_token_ids=(1, 9),
            bad_words=((4,), (5, 6)),
            stop=("é\n", "]"),
        ),
    )
    first.home, first.status = (3, 12), RequestStatus.PREEMPTED
    first.num_cached_tokens, first.num_preemptions = 2, 4
    first.append(8, -0.1)
    first.append(9, float("-inf"))
    first.output_top = [(1, [8, 4], [-0.1, -2.5]), (7, [], [])]
    first.prompt_logprobs, first.prompt_top = [-0.5, -7.5], [(1, [2], [-0.5]), (3, [9], [-0.25])]
    first.finish_reason, first.stop_reason = "stop", "]"
    second = Request("b", [0], max_tokens=1)
    second.home = (0, 0)
    second.append(4, -1.0)
    assert second.num_prompt_logprobs is None and second.extras is None
    alone, cpu = GroupCoordinator(0, 1, None), torch.device("cpu")
    for request, copy in zip((first, second), exchange_objects(alone, [[first, second]], cpu), strict=True):
        assert copy is not request
        for name in Request.__slots__:
            assert getattr(copy, name) == getattr(request, name), name
    assert exchange_objects(alone, [[]], cpu) == []


def token_of(request: Request) -> tuple[int, float]:
    """What a model would draw: of the seed and the position alone."""
    draw = random.Random(request.seed * 1000 + request.num_output_tokens)
    return draw.randrange(50), -draw.random()


def run_traffic(seeds: range) -> list[int]:
    """Random requests, steps and rounds, without a model; the number of moves and of blocks moved."""
    return np.sum([run_traffic_of(seed) for seed in seeds], axis=0).tolist()


def run_traffic_of(seed: int) -> tuple[int, int]:
    from vllm.config import ParallelConfig
    from vllm.distributed.parallel_state import init_model_parallel
    from vllm.v1.engine.rebalancer import Rebalancer

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    together, alone = random.Random(seed), random.Random(seed * 100 + rank)
    parallel = init_model_parallel(ParallelConfig(1, size, False, rank, size))
    scheduler = make_scheduler(num_blocks=together.choice([16, 40]), prefix=seed % 2 == 0)
    cache = torch.full((scheduler.kv.pool.num_blocks, scheduler.kv.block_size), -1)
    when = together.choice([1, 5]), together.choice([(), (1, 2, 4, 8, 16)])
    rebalancer = Rebalancer(*when, scheduler, parallel, torch.device("cpu"), lambda: [(cache,)])
    for _ in range(3):
        count = alone.choice([0, 1, alone.randint(10, 30)])
        mine = [
            Request(
                str(i),
                [alone.randrange(3) for _ in range(alone.randint(1, 20))],
                max_tokens=alone.randint(1, 40),
                stop_ids=frozenset({7}),
                seed=alone.randrange(10**6),
            )
            for i in range(count)
        ]
        for request in mine:
            scheduler.add_request(request)
        while rebalancer.balance():
            for _ in range(together.choice([0, 1, 2, 7])):
                step_once(scheduler, cache)
        rebalancer.bring_home()
        assert all(request.status is RequestStatus.FINISHED for request in mine)
        assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks
        for request in mine:
            assert (request.output_token_ids, request.output_logprobs, request.finish_reason) == draw_alone(request)
    parallel.destroy()
    return rebalancer.num_moves, rebalancer.num_blocks_moved


def step_once(scheduler: Scheduler, cache: torch.Tensor) -> None:
    """A step without a model: the cache holds the tokens themselves, and a request draws only from a right one."""
    if not scheduler.has_unfinished:
        return
    step = scheduler.schedule()
    for source, block in [(cache[source].clone(), block) for source, block in step.block_copies]:
        cache[block] = source
    pairs = list(zip(step.requests, step.num_tokens, strict=True))
    for request, num_new in pairs:
        for position in range(request.num_computed_tokens, request.num_computed_tokens + num_new):
            write(cache, request, position)
    for request, num_new in pairs:
        end = request.num_computed_tokens + num_new
        assert cache[request.block_ids].flatten()[:end].tolist() == request.token_ids[:end]
    drawn = [token_of(r) for r, n in pairs if r.num_computed_tokens + n == len(r.token_ids)]
    scheduler.update_from_output(step, [token for token, _ in drawn], [logprob for _, logprob in drawn])
    check_invariants(scheduler, step)


def write(cache: torch.Tensor, request: Request, position: int) -> None:
    block, offset = divmod(position, cache.shape[1])
    cache[request.block_ids[block], offset] = request.token_ids[position]


def draw_alone(request: Request) -> tuple[list[int], list[float], str | None]:
    """The outcome of the same request where nothing moves."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    again = Request("x", prompt, max_tokens=request.max_tokens, stop_ids=request.stop_ids, seed=request.seed)
    while not again.append(*token_of(again)):
        pass
    return again.output_token_ids, again.output_logprobs, again.finish_reason


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_random_interleavings_lose_nothing(world_size: int) -> None:
    counts = run_ranks(run_traffic, world_size, range(6), timeout_s=100)
    assert min(counts[0]) > 30 and all(count == counts[0] for count in counts)


def make_parts(**options: Any) -> tuple[Scheduler, Any, torch.Tensor]:
    """A scheduler of this rank, its rebalancer with all others, and its cache, which holds the tokens themselves."""
    from vllm.config import ParallelConfig
    from vllm.distributed.parallel_state import init_model_parallel
    from vllm.v1.engine.rebalancer import Rebalancer

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    scheduler = make_scheduler(**options)
    parallel = init_model_parallel(ParallelConfig(1, size, False, rank, size))
    cache = torch.full((scheduler.kv.pool.num_blocks, scheduler.kv.block_size), -1)
    rebalancer = Rebalancer(4, (), scheduler, parallel, torch.device("cpu"), lambda: [(cache,)])
    return scheduler, rebalancer, cache


def run_borders() -> list[str]:
    """Requests that end in the last step before a round, or in the first after it; what each round moved."""
    scheduler, rebalancer, cache = make_parts()
    is_first = torch.distributed.get_rank() == 0
    seen = []
    for lengths in ([4, 4, 4, 4], [5, 5, 5, 5], [4, 5, 4, 5]):
        mine = [Request(str(i), [1, 2], max_tokens=n) for i, n in enumerate(lengths) if is_first]
        for request in mine:
            scheduler.add_request(request)
        for _ in range(4):
            step_once(scheduler, cache)
        before = rebalancer.num_moves
        while rebalancer.balance():
            step_once(scheduler, cache)
        rebalancer.bring_home()
        assert [r.num_output_tokens for r in mine] == lengths * is_first
        assert all((r.output_token_ids, r.output_logprobs, r.finish_reason) == draw_alone(r) for r in mine)
        seen.append(f"{lengths}: {rebalancer.num_moves - before}")
    return seen


def test_requests_that_end_beside_a_round() -> None:
    seen = ["[4, 4, 4, 4]: 0", "[5, 5, 5, 5]: 2", "[4, 5, 4, 5]: 1"]
    assert run_ranks(run_borders, 2, timeout_s=60) == [seen, seen]


def run_states() -> dict[str, list[str]]:
    """One replica with requests of every state, one with none; the ids that left, the waiting ones first."""
    scheduler, rebalancer, cache = make_parts(max_num_seqs=3, num_blocks=64)
    is_first = torch.distributed.get_rank() == 0
    mine = [Request(str(i), [1, 2], max_tokens=20) for i in range(6) if is_first]
    for request in mine:
        scheduler.add_request(request)
    step_once(scheduler, cache)
    if is_first:  # 0, 1 run; 2 was preempted; 3, 4, 5 have not begun
        scheduler._preempt(scheduler.running.pop())
    rebalancer.balance()
    assert [r.request_id for r in mine if r.status is RequestStatus.RUNNING] == ["0", "1"] * is_first
    states = {
        "waiting": [r.request_id for r in scheduler.waiting],
        "running": [r.request_id for r in scheduler.running],
    }
    while rebalancer.balance():
        step_once(scheduler, cache)
    rebalancer.bring_home()
    assert all((r.output_token_ids, r.output_logprobs, r.finish_reason) == draw_alone(r) for r in mine)
    return states


def test_what_has_not_begun_moves_first() -> None:
    home, away = run_ranks(run_states, 2, timeout_s=60)
    assert home == {"waiting": ["2"], "running": ["0", "1"]}
    assert away["waiting"] == ["guest_0_0", "guest_0_1", "guest_0_2"] and away["running"] == []


def test_blocks_of_guests_give_way() -> None:
    """What came with its cache and waits holds no blocks that a running request, or the one before it, needs."""
    for num_blocks, expected in ((4, True), (12, False)):
        scheduler = make_scheduler(num_blocks=num_blocks, block_size=2, max_num_seqs=1, budget=16)
        native = Request("native", [1, 2], max_tokens=6)
        scheduler.add_request(native)
        cache = torch.full((num_blocks, 2), -1)
        step_once(scheduler, cache)
        guest = Request("guest", [3, 4, 5, 6], max_tokens=3)
        guest.status = RequestStatus.PREEMPTED
        scheduler.add_request(guest)
        blocks = scheduler.kv.allocate_slots(guest, 4)
        assert blocks
        cache[blocks] = torch.tensor([[3, 4], [5, 6]])
        guest.num_computed_tokens = 4
        has_lost_cache = False
        while scheduler.has_unfinished:
            step_once(scheduler, cache)
            has_lost_cache |= guest.num_output_tokens == 0 and not guest.block_ids
        assert native.num_output_tokens == 6 and guest.num_output_tokens == 3
        assert has_lost_cache is expected and native.num_preemptions == 0
        assert scheduler.kv.pool.num_free_blocks == num_blocks


def test_abort_frees_the_blocks_of_guests() -> None:
    scheduler = make_scheduler()
    guest = Request("guest", [3, 4, 5, 6], max_tokens=3)
    guest.status = RequestStatus.PREEMPTED
    scheduler.add_request(guest)
    scheduler.kv.allocate_slots(guest, 4)
    scheduler.abort_all()
    assert not scheduler.has_unfinished and scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks


def fail_and_go_on(path: str) -> tuple[Any, Any]:
    """Outputs of a generation after one that broke while guests ran, and of an engine without such a past."""
    from tests.vllm.test_parity import as_inputs, make_prompts
    from vllm import LLM, SamplingParams

    prompts = as_inputs(make_prompts(NUM_PROMPTS, 20, seed=4))
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=3)
    outputs = []
    for is_to_fail in (True, False):
        layout = {"data_parallel_size": 2, "rebalance_interval": 2} | EXPERTS  # in lock-step: both break in one step
        llm = LLM(path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, **layout)
        mine = prompts if llm.config.parallel.replica == 0 else []
        core, step = llm.core, llm.core.step

        def breaking(core: Any = core, step: Any = step) -> Any:
            if core.num_steps == 7:
                raise KeyboardInterrupt
            return step()

        if is_to_fail:
            core.step = breaking  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                llm.generate(mine, params)
            assert llm.engine.rebalancer.num_moves > 0
            core.step = step  # type: ignore[method-assign]
        llm.sleep(1)
        llm.wake_up()
        outputs.append([o.outputs[0].token_ids for o in llm.generate(mine, params)])
        assert core.scheduler.kv.pool.num_free_blocks == core.scheduler.kv.pool.num_blocks
        llm.shutdown()
    return outputs[0], outputs[1]


def test_a_broken_generation_leaves_nothing_behind(checkpoint: str) -> None:
    for after_failure, fresh in run_ranks(fail_and_go_on, 2, checkpoint, timeout_s=100):
        assert after_failure == fresh


NUM_PROMPTS = 8


def generate(path: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each layout, all prompts on the first replica, then some on each, then a sleep in between."""
    from tests.vllm.test_parity import as_inputs, make_prompts
    from vllm import LLM, SamplingParams

    prompts = as_inputs(make_prompts(NUM_PROMPTS, 20, seed=4))
    params = [
        SamplingParams(
            max_tokens=5 + 4 * i,
            ignore_eos=True,
            seed=i,
            temperature=0.8,
            n=1 + i % 2,
            logprobs=2 * (i % 2),
            prompt_logprobs=1 if i == 6 else None,
            repetition_penalty=1.3 if i % 4 == 3 else 1.0,
            frequency_penalty=0.5 if i == 7 else 0.0,
            stop=list("abcdefghijklmnopqrstuvwxyz") if i == 5 else None,
        )
        for i in range(NUM_PROMPTS)
    ]
    results = []
    for layout in layouts:
        sizes = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "enable_prefix_caching": False}
        llm = LLM(path, **(sizes | layout))
        replica = llm.config.parallel.replica
        mine = slice(0, NUM_PROMPTS if replica == 0 else 0)
        outputs = llm.generate(prompts[mine], params[mine])
        num_steps, rebalancer = llm.core.num_steps, llm.engine.rebalancer
        num_moves, num_blocks_moved = rebalancer.num_moves, rebalancer.num_blocks_moved
        llm.sleep(1)
        llm.wake_up()
        again = llm.generate(prompts[mine][replica:], params[mine][replica:])
        assert llm.core.scheduler.kv.pool.num_free_blocks == llm.core.scheduler.kv.pool.num_blocks
        llm.shutdown()
        results.append(
            {
                "outputs": outputs,
                "again": again,
                "num_steps": num_steps,
                "num_moves": num_moves,
                "num_blocks_moved": num_blocks_moved,
            }
        )
    return results


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_checkpoint(tmp_path_factory.mktemp("tiny"))


EXPERTS = {"enable_expert_parallel": True}
LAYOUTS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "lockstep": (2, [{"data_parallel_size": 2} | EXPERTS]),
    "apart": (
        2,
        [
            {"data_parallel_size": 2, "num_gpu_blocks_override": 32},  # some wait, some are preempted
            {"data_parallel_size": 2, "enforce_eager": False, "device": CAPTURING} | EXPERTS,
        ],
    ),
    "apart, room for all": (2, [{"data_parallel_size": 2}]),
    "tensor": (4, [{"data_parallel_size": 2, "tensor_parallel_size": 2}]),
    "tensor, lockstep": (4, [{"data_parallel_size": 2, "tensor_parallel_size": 2} | EXPERTS]),
    "four": (4, [{"data_parallel_size": 4}]),
}
SLOW = ("lockstep", "apart, room for all", "tensor, lockstep", "four")  # the others have their parts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS]
)
def test_a_skewed_load_gives_the_same_in_fewer_steps(name: str, checkpoint: str) -> None:
    world_size, layouts = LAYOUTS[name]
    compare_with_no_moves(world_size, checkpoint, layouts, timeout_s=200)


def compare_with_no_moves(world_size: int, checkpoint: str, layouts: list[dict[str, Any]], **launch: Any) -> None:
    """Each layout with and without moves: the same outputs everywhere, in three quarters of the steps."""
    both = [layout | {"rebalance_interval": interval} for layout in layouts for interval in (0, 4)]
    ranks = run_ranks(generate, world_size, checkpoint, both, **launch)
    for index, layout in enumerate(layouts):
        stay, move = [[results[2 * index + i] for results in ranks] for i in (0, 1)]
        num_moves = [result["num_moves"] for result in move]
        assert all(result["num_moves"] == 0 for result in stay)
        assert min(num_moves) > 2, layout
        for alone, moved in zip(stay, move, strict=True):
            assert_same(alone["outputs"], moved["outputs"])
            assert_same(alone["again"], moved["again"])
        assert max(r["num_steps"] for r in move) < 0.75 * max(r["num_steps"] for r in stay), layout
    assert any(result["num_blocks_moved"] for result in ranks[0])


def assert_same(expected: list[Any], found: list[Any]) -> None:
    """Same requests in the same order, same tokens and reasons, log-probs equal but for rounding."""
    assert [output.request_id for output in found] == [output.request_id for output in expected]
    for one, other in zip(expected, found, strict=True):
        assert other.prompt_token_ids == one.prompt_token_ids and other.num_cached_tokens == one.num_cached_tokens
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        for at, there in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
            assert (at or {}).keys() == (there or {}).keys()
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (b.index, b.token_ids, b.finish_reason, b.stop_reason, b.text) == (
                a.index,
                a.token_ids,
                a.finish_reason,
                a.stop_reason,
                a.text,
            )
            assert b.sampled_logprobs == pytest.approx(a.sampled_logprobs, abs=1e-5)
            assert (a.top_logprobs is None) == (b.top_logprobs is None)
            for top_a, top_b in zip(a.top_logprobs or [], b.top_logprobs or [], strict=True):
                assert {t: v.rank for t, v in top_a.items()} == {t: v.rank for t, v in top_b.items()}


def test_a_negative_interval_is_refused(checkpoint: str, tmp_path: Path) -> None:
    from vllm import LLM

    with pytest.raises(ValueError, match="rebalance_interval=-1"):
        LLM(checkpoint, skip_tokenizer_init=True, max_model_len=64, rebalance_interval=-1)
