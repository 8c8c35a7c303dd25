"""What the graders' processes may not do: outlive the driver, keep it waiting, or put a NaN into a batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from verl.utils.reward_score.functions import RewardFunctionSpec
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool

REWARD = """
import os, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    if solution_str == "nan":
        return float("nan")
    if solution_str == "no score":
        return {"accuracy": 1.0}
    if solution_str == "text":
        return {"score": "high"}
    if solution_str == "flood":
        while True:
            print("x" * 1_000_000, flush=True)
    if solution_str == "exit":
        sys.exit(0)
    if solution_str == "child":
        started = subprocess.Popen(["sleep", "600"])
        open(extra_info["pid_file"], "w").write(str(started.pid))
        time.sleep(600)
    if solution_str == "sleep":
        time.sleep(600)
    if solution_str == "memory":
        return float(len(bytearray(1 << 40)))
    if solution_str == "abort":
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'")
        os.abort()
    print("graded", solution_str)
    return float(extra_info.get("value", 1.0))
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    """The file of a reward function that misbehaves on demand."""
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    return str(path)


def _job(answer: str, **extra_info: object) -> ScoringJob:
    return ScoringJob("test", answer, "42", extra_info)


@pytest.mark.timeout(90)
def test_results_that_are_no_score_are_ungraded_and_the_grader_goes_on(function: str) -> None:
    pool = ScoringPool(RewardFunctionSpec(function, "compute_score"), num_workers=1, timeout_s=10.0)
    answers = ["nan", "good", "no score", "text", "flood", "exit", "good again"]
    results = [future.result() for future in pool.submit([_job(answer) for answer in answers])]
    pool.close()
    assert [result.is_graded for result in results] == [False, True, False, False, False, False, True]
    assert all(result.parts == {"score": 0.0} for result in results if not result.is_graded)


@pytest.mark.timeout(60)
def test_extra_info_belongs_to_the_job(function: str) -> None:
    pool = ScoringPool(RewardFunctionSpec(function, "compute_score"), num_workers=1, timeout_s=10.0)
    futures = pool.submit([_job("a", value=0.25), _job("a", value=0.75), _job("a", value=0.25)])
    assert [future.result().parts["score"] for future in futures] == [0.25, 0.75, 0.25]
    assert futures[0] is futures[2]
    pool.close()


@pytest.mark.timeout(60)
def test_close_does_not_wait_for_an_answer_that_hangs(function: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    pool = ScoringPool(RewardFunctionSpec(function, "compute_score"), num_workers=1, timeout_s=600.0)
    hanging, waiting = pool.submit([_job("child", pid_file=str(pid_file)), _job("good")])
    grandchild = psutil.Process(int(_wait_for(pid_file)))
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5
    for future in (hanging, waiting):
        with pytest.raises(CancelledError):
            future.result(timeout=0)
    assert _has_ended(grandchild), "what an answer started ends with its grader"


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_grader_that_does_not_read_times_out_and_holds_up_no_close(function: str) -> None:
    """A request of more than a pipe's 64 KiB waits to be read."""
    pool = ScoringPool(RewardFunctionSpec(function, "compute_score"), num_workers=1, timeout_s=2.0)
    pool.submit([_job("good")])[0].result()

    def stop() -> None:
        [grader] = [one for one in psutil.Process().children() if "scoring_worker" in " ".join(one.cmdline())]
        grader.suspend()

    stop()
    result = pool.submit([_job("x" * (1 << 20))])[0].result(timeout=20)
    assert (result.status, result.error) == ("timeout", "took more than 2 s")
    assert pool.submit([_job("y" * (1 << 20))])[0].result(timeout=20).is_graded
    stop()
    hanging = pool.submit([_job("z" * (1 << 20))])[0]
    time.sleep(0.2)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 1.5
    with pytest.raises(CancelledError):
        hanging.result(timeout=0)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_limit_on_memory_is_named_where_a_grader_runs_into_it(function: str) -> None:
    """2 GiB are not enough for this function's array, or for torch; without a limit the array is refused by the OS."""
    pool = ScoringPool(
        RewardFunctionSpec(function, "compute_score"), num_workers=1, timeout_s=10.0, memory_limit_mb=2048
    )
    results = [future.result() for future in pool.submit([_job("memory"), _job("abort"), _job("good"), _job("nan")])]
    pool.close()
    limit = "(a scoring process may use 2048 MiB of address space: raise reward_model.memory_limit_mb, 0 sets no limit)"
    assert results[0].error == f"MemoryError:  {limit}"
    assert results[1].error == f"ended its process: signal SIGABRT {limit}"
    assert results[2].is_graded and "MiB" not in results[3].error
    Path(function).write_text(
        "import resource\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    )
    with Path(function).open("a") as file:
        file.write("    return float(resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY)\n")
    pool = ScoringPool(RewardFunctionSpec(function, "compute_score"), num_workers=1, timeout_s=10.0, memory_limit_mb=0)
    assert pool.submit([_job("any")])[0].result().parts["score"] == 1.0
    pool.close()


LIMITLESS = """
import resource

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY)
"""
DRIVER = """
import sys
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool
from verl.utils.reward_score.functions import RewardFunctionSpec

pool = ScoringPool(RewardFunctionSpec(sys.argv[1], "compute_score"), num_workers=2, timeout_s=600.0)
[future] = pool.submit([ScoringJob("test", "good", "42", {})])
future.result()
pool.submit([ScoringJob("test", "sleep", str(i), {}) for i in range(2)])
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(90)
def test_graders_end_with_a_driver_that_is_killed(function: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, function], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdin is not None and driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    graders = psutil.Process(driver.pid).children(recursive=True)
    assert graders
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait(10)
    driver.stdin.close()
    driver.stdout.close()
    assert all(_has_ended(grader) for grader in graders)


def _wait_for(path: Path) -> str:
    """The text of a file that a grader writes; the test's own time limit ends the wait."""
    while not path.is_file() or not path.read_text():
        time.sleep(0.05)
    return path.read_text()


def _has_ended(process: psutil.Process, timeout_s: float = 5.0) -> bool:
    """True once the process is gone or a zombie that its adopter has yet to collect."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
