"""No answer can hang, crash or take over the run: graders are processes with a limit each."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch

from verl.protocol import DataProto
from verl.utils.reward_score import scoring_pool
from verl.utils.reward_score.functions import RewardFunctionSpec
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool
from verl.workers.config import CustomRewardFunctionConfig, RewardModelConfig
from verl.workers.reward_manager import PooledRewardManager, get_reward_manager_cls

FUNCTION = str(Path(__file__).with_name("rewards_for_tests.py"))
TIMEOUT_S = 1.0


@pytest.fixture
def pool() -> Iterator[ScoringPool]:
    pool = ScoringPool(RewardFunctionSpec(FUNCTION, "compute_score"), num_workers=2, timeout_s=TIMEOUT_S)
    yield pool
    pool.close()


def _job(answer: str, truth: str = "42") -> ScoringJob:
    return ScoringJob("test", answer, truth, {})


def _graders() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "scoring_worker" in " ".join(child.cmdline())]


@pytest.mark.timeout(60)
def test_bad_answers_are_ungraded_in_time_and_good_ones_keep_their_order(pool: ScoringPool) -> None:
    [future] = pool.submit([_job("warm-up")])
    future.result()
    answers = ["42", "hang", "41", "die", "42", "raise", "sleep", "print", "memory", "float"]
    start = time.monotonic()
    results = [future.result() for future in pool.submit([_job(answer) for answer in answers])]
    seconds = time.monotonic() - start
    is_graded = [result.is_graded for result in results]
    assert is_graded == [True, False, True, False, True, False, False, True, False, True]
    assert [result.parts["score"] for result in results] == [1.0, 0, 0, 0, 1.0, 0, 0, 0, 0, 0.25]
    assert results[0].parts == {"score": 1.0, "accuracy": 1.0}
    assert seconds < 2 * TIMEOUT_S + 12, "two answers run into the limit, and killed processes are replaced"


@pytest.mark.timeout(60)
def test_equal_answers_are_graded_once(pool: ScoringPool) -> None:
    first, again, other = pool.submit([_job("pid"), _job("pid"), _job("pid", truth="43")])
    assert first is again
    assert first is not other
    assert pool.submit([_job("pid")])[0] is first


@pytest.mark.timeout(60)
def test_an_answer_without_a_grade_is_graded_anew(pool: ScoringPool) -> None:
    jobs = [_job("hang"), _job("raise"), _job("42")]
    first = pool.submit(jobs)
    assert [future.result().is_graded for future in first] == [False, False, True]
    again = pool.submit(jobs)
    assert [future is before for future, before in zip(again, first, strict=True)] == [False, False, True]
    assert [future.result().is_graded for future in again] == [False, False, True]


@pytest.mark.timeout(60)
def test_grades_take_no_more_memory_than_their_limit(pool: ScoringPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool._grades, "_max_bytes", 3 * scoring_pool._GRADE_BYTES)
    jobs = [_job(str(number)) for number in range(8)]
    futures = []
    for job in jobs:
        futures += pool.submit([job])
        futures[-1].result()
    deadline = time.monotonic() + 10
    while len(pool._grades._futures) > 3 and time.monotonic() < deadline:
        time.sleep(0.01)  # a result is there a moment before the pool has counted it
    assert pool._grades._num_bytes == 3 * scoring_pool._GRADE_BYTES and len(pool._grades._futures) == 3
    assert pool.submit(jobs[-1:])[0] is futures[-1] and pool.submit(jobs[:1])[0] is not futures[0]


@pytest.mark.timeout(60)
def test_huge_answers_pass_through(pool: ScoringPool) -> None:
    huge = "7" * 3_000_000
    [future] = pool.submit([_job(huge, truth=huge)])
    assert future.result().parts["score"] == 1.0


@pytest.mark.timeout(60)
def test_no_process_is_left_after_close() -> None:
    before = {process.pid for process in _graders()}
    pool = ScoringPool(RewardFunctionSpec(FUNCTION, "compute_score"), num_workers=2, timeout_s=TIMEOUT_S)
    futures = pool.submit([_job(str(i)) for i in range(4)])
    [future.result() for future in futures]
    started = [process for process in _graders() if process.pid not in before]
    assert started
    pool.close()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started)


@pytest.mark.timeout(60)
def test_a_killed_grader_is_replaced(pool: ScoringPool) -> None:
    for future in pool.submit([_job(str(i)) for i in range(8)]):
        future.result()
    for process in _graders():
        os.kill(process.pid, 9)
    results = [future.result() for future in pool.submit([_job(str(i)) for i in range(42, 50)])]
    assert sum(result.is_graded for result in results) >= 6, "at most the answers that met a dead process are lost"


@pytest.mark.timeout(60)
def test_a_function_that_cannot_be_loaded_is_an_error_not_a_score_of_zero() -> None:
    pool = ScoringPool(RewardFunctionSpec(FUNCTION, "absent"), num_workers=1, timeout_s=TIMEOUT_S)
    [future] = pool.submit([_job("42")])
    with pytest.raises(RuntimeError, match="absent"):
        future.result()
    pool.close()


class _Words:
    """A tokenizer of two words, of which the manager needs only this."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def batch_decode(self, tokens: list[list[int]], **given: bool) -> list[str]:
        return ["".join("42" if token == 1 else "x" for token in row) for row in tokens]


@pytest.mark.timeout(60)
def test_manager_puts_the_score_on_the_last_response_token() -> None:
    manager = PooledRewardManager(
        _Words(),
        RewardModelConfig(num_workers=1, timeout_s=5.0),
        CustomRewardFunctionConfig(path=FUNCTION, reward_kwargs={"bonus": 0.5}),
    )
    responses = torch.tensor([[1, 0, 0], [2, 2, 0], [0, 0, 0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    columns: dict[str, list] = {
        "data_source": ["s"] * 3,
        "reward_model": [{"ground_truth": "42", "style": "rule"}] * 3,
        "extra_info": [{"index": 0}] * 3,
    }
    batch = DataProto.from_dict({"responses": responses, "response_mask": mask}, columns)
    scores = manager.start(batch).result()
    manager.close()
    assert torch.allclose(scores.token_level_scores, torch.tensor([[1.5, 0, 0], [0, 0.5, 0], [0.5, 0, 0]]))
    assert np.array_equal(scores.parts["accuracy"], [1.0, 0.0, 0.0])
    assert np.array_equal(scores.parts["ungraded"], [0.0, 0.0, 0.0])
    assert scores.responses == ["42", "xx", ""]


@pytest.mark.timeout(60)
def test_extra_info_reaches_the_function_whole(tmp_path: Path) -> None:
    function = tmp_path / "echo.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 0.0, 'extra': repr(sorted(extra_info.items()))}\n"
    )
    extra = {
        "index": np.int64(3), "tags": ["a", "b"], "limits": {"s": 2.5, "sizes": np.array([1, 2])}, "none": None,
        "day": datetime.date(2025, 1, 31),
    }  # fmt: skip
    manager = PooledRewardManager(
        _Words(), RewardModelConfig(num_workers=1, timeout_s=5.0), CustomRewardFunctionConfig(path=str(function))
    )
    columns: dict[str, list] = {
        "data_source": ["s", "s"],
        "reward_model": [{"ground_truth": "42"}] * 2,
        "extra_info": [extra, None],
    }
    tensors = {"responses": torch.ones(2, 1, dtype=torch.long), "response_mask": torch.ones(2, 1, dtype=torch.long)}
    scores = manager.start(DataProto.from_dict(tensors, columns)).result()
    manager.close()
    plain = {**extra, "index": 3, "limits": {"s": 2.5, "sizes": [1, 2]}, "day": "2025-01-31"}
    assert [sample.result.parse["extra"] for sample in scores.samples] == [repr(sorted(plain.items())), "[]"]


def test_unknown_manager_is_an_error() -> None:
    with pytest.raises(ValueError, match="known: batch, dapo, gdpo, naive, prime"):
        get_reward_manager_cls("absent")
