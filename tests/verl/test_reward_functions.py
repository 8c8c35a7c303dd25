"""Reward functions of every kind: one by one, batched, async, by data source; what a bad one costs; what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.utils.reward_score.functions import DEFAULT_FUNCTION, RewardFunctionSpec, function_of, load_reward_function
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool, ScoringResult
from verl.workers.config import CustomRewardFunctionConfig

FUNCTIONS = """
import asyncio, os, time

def single(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "pred": solution_str.upper(), "none": None}

def by_keyword(ground_truth, solution_str, **others):
    return float(solution_str == ground_truth)

def batched(data_sources, solution_strs, ground_truths, extra_infos, factor=1.0):
    if "die" in solution_strs:
        os._exit(3)
    if "hang" in solution_strs:
        time.sleep(600)
    if "raise" in solution_strs:
        raise KeyError("no such thing")
    return [{"score": factor * (text == truth), "size": len(solution_strs)}
            for text, truth in zip(solution_strs, ground_truths)]

def short(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0]

async def waiting(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        await asyncio.sleep(600)
    if solution_str == "block":
        time.sleep(600)
    if solution_str == "raise":
        raise KeyError("no such thing")
    await asyncio.sleep(0.5)
    return float(solution_str == ground_truth)

_pair = asyncio.Semaphore(2)
_lock = asyncio.Lock()
_answers = asyncio.Queue()
_server = None
_left = []

async def _serve():
    # What a client of a module does: it answers for as long as the process lives.
    while True:
        number, future = await _answers.get()
        future.set_result(number)

async def shared(data_source, solution_str, ground_truth, extra_info):
    global _server
    async with _pair, _lock:
        await asyncio.sleep(0.001)
    if _server is None:
        _server = asyncio.create_task(_serve())
    future = asyncio.get_running_loop().create_future()
    await _answers.put((float(extra_info["row"]), future))
    return await future

async def leaves(data_source, solution_str, ground_truth, extra_info):
    async def rest():
        await asyncio.sleep(0.2)
        if solution_str == "block later":
            time.sleep(600)
        if solution_str == "raise later":
            raise KeyError("later")
        await asyncio.sleep(600)
    if solution_str.endswith("later"):
        _left.append(asyncio.create_task(rest()))
    if solution_str == "hang later":
        await asyncio.sleep(600)
    await asyncio.sleep(0.3 if solution_str == "slow" else 0)
    return {"score": 1.0, "pid": os.getpid()}

def runs_itself(data_source, solution_str, ground_truth, extra_info):
    return asyncio.run(waiting("s", solution_str, ground_truth, extra_info))

def returns_awaitable(data_source, solution_str, ground_truth, extra_info):
    return shared(data_source, solution_str, ground_truth, extra_info)

async def batched_shared(data_sources, solution_strs, ground_truths, extra_infos):
    return await asyncio.gather(*map(shared, data_sources, solution_strs, ground_truths, extra_infos))

async def batched_waiting(data_sources, solution_strs, ground_truths, extra_infos):
    await asyncio.sleep(0.01)
    return [float(text == truth) for text, truth in zip(solution_strs, ground_truths)]

def own_limit(data_source, solution_str, ground_truth, extra_info):
    raise TimeoutError("3 of 9 tests")

def two_parameters(solution_str, ground_truth):
    return 1.0
"""


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., RewardFunctionSpec]:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return lambda name, **kwargs: RewardFunctionSpec(str(path), name, kwargs)


def _graded(
    function: RewardFunctionSpec, answers: list[str], *, timeout_s: float = 5.0, **settings: int
) -> list[ScoringResult]:
    pool = ScoringPool(function, num_workers=1, timeout_s=timeout_s, **settings)
    futures = pool.submit([ScoringJob("s", answer, "42", {}) for answer in answers])
    results = [future.result() for future in futures]
    pool.close()
    return results


def _outcomes(results: list[ScoringResult]) -> list[tuple[str, float]]:
    return [(result.status, result.parts["score"]) for result in results]


@pytest.mark.timeout(60)
def test_texts_beside_the_numbers_are_what_the_grader_read(spec: Callable[..., RewardFunctionSpec]) -> None:
    [result] = _graded(spec("single"), ["abc"])
    assert result.parts == {"score": 0.0}
    assert result.parse == {"pred": "ABC", "none": None}
    assert result.function == spec("single")
    assert result.version == load_reward_function(spec("single")).version != ""
    assert 0 <= result.seconds < 5


@pytest.mark.timeout(60)
def test_parameters_are_found_by_their_names(spec: Callable[..., RewardFunctionSpec]) -> None:
    assert _outcomes(_graded(spec("by_keyword"), ["42", "41"])) == [("ok", 1.0), ("ok", 0.0)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad, status", [("die", "error"), ("hang", "timeout"), ("raise", "error")])
def test_of_a_batch_only_the_guilty_sample_is_lost(
    spec: Callable[..., RewardFunctionSpec], bad: str, status: str
) -> None:
    results = _graded(spec("batched", factor=2.0), ["42", "1", bad, "2", "3"], timeout_s=1.0, batch_size=4)
    assert _outcomes(results) == [("ok", 2.0), ("ok", 0.0), (status, 0.0), ("ok", 0.0), ("ok", 0.0)]
    assert "3" in results[2].error or bad != "die", "the exit code is told"


@pytest.mark.timeout(60)
def test_a_batch_has_the_size_that_the_config_says(spec: Callable[..., RewardFunctionSpec]) -> None:
    results = _graded(spec("batched"), [str(number) for number in range(10)], batch_size=4)
    assert {result.parts["size"] for result in results} <= {1.0, 2.0, 4.0}
    assert max(result.parts["size"] for result in results) == 4


@pytest.mark.timeout(60)
def test_sources_that_take_turns_do_not_spoil_batches(spec: Callable[..., RewardFunctionSpec]) -> None:
    pool = ScoringPool(spec("batched"), by_source={"b": spec("single")}, num_workers=1, timeout_s=5.0)
    futures = pool.submit([ScoringJob("ab"[n % 2], str(n), "42", {}) for n in range(12)])
    assert [future.result().parts.get("size") for future in futures] == [6.0, None] * 6
    pool.close()


@pytest.mark.timeout(60)
def test_a_batch_with_too_few_results_is_graded_one_by_one(spec: Callable[..., RewardFunctionSpec]) -> None:
    results = _graded(spec("short"), ["1", "2"])
    assert [result.status for result in results] == ["ok", "ok"]


@pytest.mark.timeout(60)
def test_async_answers_wait_together_and_each_has_its_limit(spec: Callable[..., RewardFunctionSpec]) -> None:
    pool = ScoringPool(spec("waiting"), num_workers=1, timeout_s=2.0, max_concurrent=16)
    pool.submit([ScoringJob("s", "warm-up", "", {})])[0].result()
    start = time.monotonic()
    answers = ["42", *(str(number) for number in range(14)), "raise"]
    futures = pool.submit([ScoringJob("s", answer, "42", {}) for answer in answers])
    results = [future.result() for future in futures]
    assert time.monotonic() - start < 2.0, "16 answers of half a second each"
    assert [result.status for result in results] == ["ok"] * 15 + ["error"]
    futures = pool.submit([ScoringJob("s", answer, "42!", {}) for answer in ("42!", "hang", "41")])
    assert [future.result().status for future in futures] == ["ok", "timeout", "ok"]
    pool.close()


@pytest.mark.timeout(60)
def test_an_async_function_that_blocks_costs_one_sample(spec: Callable[..., RewardFunctionSpec]) -> None:
    results = _graded(spec("waiting"), ["42", "block", "41"], timeout_s=1.0)
    assert _outcomes(results) == [("ok", 1.0), ("timeout", 0.0), ("ok", 0.0)]


@pytest.mark.timeout(60)
def test_batched_and_async_together(spec: Callable[..., RewardFunctionSpec]) -> None:
    assert _outcomes(_graded(spec("batched_waiting"), ["42", "41"])) == [("ok", 1.0), ("ok", 0.0)]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["shared", "returns_awaitable", "batched_shared"])
def test_locks_queues_and_tasks_of_a_module_live_as_long_as_its_process(
    spec: Callable[..., RewardFunctionSpec], name: str
) -> None:
    pool = ScoringPool(spec(name), num_workers=1, timeout_s=5.0, max_concurrent=8)
    for first in (0, 8, 16):
        futures = pool.submit([ScoringJob("s", "42", "42", {"row": first + row}) for row in range(8)])
        assert [future.result().parts["score"] for future in futures] == [float(first + row) for row in range(8)]
    pool.close()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_tasks_that_are_left_behind_cost_no_other_answer(spec: Callable[..., RewardFunctionSpec]) -> None:
    """One that blocks hangs the next call, whose answer is then graded in a new process; with a hung one they end."""
    pool = ScoringPool(spec("leaves"), num_workers=1, timeout_s=0.6)
    results = [
        pool.submit([ScoringJob("s", answer, "42", {"row": row})])[0].result()
        for row, answer in enumerate(["raise later", "slow", "block later", "slow", "hang later", "good"])
    ]
    pool.close()
    assert [result.status for result in results] == ["ok", "ok", "ok", "ok", "timeout", "ok"]
    pids = [result.parts.get("pid") for result in results]
    assert pids[0] == pids[1] == pids[2] != pids[3] != pids[5]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_plain_function_may_run_a_loop_of_its_own(spec: Callable[..., RewardFunctionSpec]) -> None:
    assert _outcomes(_graded(spec("runs_itself"), ["42", "41"])) == [("ok", 1.0), ("ok", 0.0)]


@pytest.mark.timeout(60)
def test_a_limit_of_the_function_itself_counts_as_a_time_out(spec: Callable[..., RewardFunctionSpec]) -> None:
    [result] = _graded(spec("own_limit"), ["42"])
    assert (result.status, result.error) == ("timeout", "3 of 9 tests")


@pytest.mark.timeout(60)
def test_each_source_has_its_function(spec: Callable[..., RewardFunctionSpec]) -> None:
    by_source = {"code/*": spec("own_limit"), "math": spec("batched", factor=3.0)}
    pool = ScoringPool(spec("single"), by_source=by_source, num_workers=2, timeout_s=5.0)
    sources = ["math", "code/apps", "other", "math"]
    futures = pool.submit([ScoringJob(source, "42", "42", {"row": row}) for row, source in enumerate(sources)])
    results = [future.result() for future in futures]
    pool.close()
    assert _outcomes(results) == [("ok", 3.0), ("timeout", 0.0), ("ok", 1.0), ("ok", 3.0)]


def test_which_function_a_source_gets() -> None:
    a, b, c = (RewardFunctionSpec(name) for name in "abc")
    by_source = {"math*": a, "math/x": b, "*": c}
    chosen = [function_of(source, by_source, None) for source in ("math/x", "math/y", "else")]
    assert chosen == [b, a, c]
    assert function_of("else", {}, None) == DEFAULT_FUNCTION
    assert function_of("else", {}, a) == a


def test_signatures_are_checked_when_a_function_is_loaded(spec: Callable[..., RewardFunctionSpec]) -> None:
    with pytest.raises(ValueError, match=r"two_parameters of .*\(solution_str, ground_truth\) cannot be called"):
        load_reward_function(spec("two_parameters"))
    with pytest.raises(ValueError, match="with the reward_kwargs bonus"):
        load_reward_function(spec("single", bonus=1.0))
    kinds = {
        name: load_reward_function(spec(name))
        for name in ("single", "batched", "waiting", "batched_waiting", "by_keyword")
    }
    assert {name for name, kind in kinds.items() if kind.is_batched} == {"batched", "batched_waiting"}
    assert {name for name, kind in kinds.items() if kind.is_async} == {"waiting", "batched_waiting"}


def test_the_version_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
    path.write_text(text)
    first = load_reward_function(RewardFunctionSpec(str(path))).version
    path.write_text(text.replace("1.0", "0.5"))
    assert load_reward_function(RewardFunctionSpec(str(path))).version != first


def test_sections_by_data_source_are_checked_together() -> None:
    config = CustomRewardFunctionConfig(
        by_data_source={
            "a": "reward.py",
            "b": {"path": "reward.py", "nam": "f"},
            "c": {"path": "~/reward.py", "reward_kwargs": {"bonus": 1}},
            "d": {"path": "reward.py", "reward_kwargs": 3, "name": 4},
        }
    )
    problems = "\n".join(config.problems("custom_reward_function"))
    assert "by_data_source.a is 'reward.py'; expected a section with path" in problems
    assert "by_data_source.b has the unknown key 'nam'; it takes path, name, reward_kwargs" in problems
    assert "by_data_source.d.name is 4" in problems and "by_data_source.d.reward_kwargs is 3" in problems
    assert "by_data_source.c" not in problems
