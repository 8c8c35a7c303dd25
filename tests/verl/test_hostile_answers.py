"""Hundreds of hostile answers through the real pool, the recipe's grader and the sandbox: they only score."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verl.hostile_answers import hostile_answers
from tests.verl.hostile_programs import bombs, forbidden_programs
from verl.utils.reward_score.functions import DEFAULT_FUNCTION, RewardFunctionSpec
from verl.utils.reward_score.sandbox import sandbox_layers
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool, ScoringResult

OBSERVED = RewardFunctionSpec(str(Path(__file__).with_name("observed_deepscaler.py")))
SECRET = "a word that no program may see"
ESCAPED = json.dumps({"inputs": [""], "outputs": ["ESCAPED"]})
# Oddly, but so: in other scripts' digits, in many boxes, behind a megabyte of nothing.
SAY_42 = {f"box: {name}" for name in ("arabic digits", "full width digits", "mathematical digits", "megabyte of boxes",
                                      "megabyte of spaces", "verbatim")} | {
    "plain: megabyte of lines", "plain: carriage returns"}  # fmt: skip
TIMEOUT_S = 0.5
SLACK_S = 2.0  # of a machine with few cores that others use too
TEST_S, CALL_S = 1.0, 8.0  # of a program, and of its grading
ENDLESS_S = 0.25  # of programs that meet no other limit than that of time
ENDLESS = {
    "endless loop", "endless loop with a handler", "endless loop that catches all", "endless sleep", "endless read",
    "stopped", "closes its streams and goes on", "catastrophic regex", "tower of powers", "factorial",
    "output that nobody reads", "descriptors that survive errors", "never ends at exit", "thread that never ends",
    "traceback without end", "timer", "fork bomb", "clone bomb", "subprocess bomb", "memory that survives errors",
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Listens on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


def test_there_are_at_least_two_hundred_of_them(tmp_path: Path) -> None:
    texts = hostile_answers("x")
    programs = forbidden_programs("x", "y", 1, 1, is_reading_limited=True, per_program=1) | bombs()
    assert len(texts) >= 100
    assert len(programs) >= 200
    assert max(map(len, texts.values())) >= 1 << 20


@pytest.mark.timeout(240)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["every third", "all"])
def test_hostile_texts_only_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.chdir(tmp_path)  # where a relative path would write
    marker = tmp_path / "marker"
    answers = dict(list(hostile_answers(str(marker)).items())[::step])
    pool = ScoringPool(OBSERVED, num_workers=2, timeout_s=TIMEOUT_S)
    try:
        start = time.monotonic()
        results = _graded(pool, [ScoringJob("math", text, "42", {"name": name}) for name, text in answers.items()])
        seconds = time.monotonic() - start
    finally:
        pool.close()
    said = dict(zip(answers, results, strict=True))
    assert {name: result.error for name, result in said.items() if result.status == "error"} == {}
    slow = {name: result.seconds for name, result in said.items() if result.seconds > TIMEOUT_S + SLACK_S}
    assert not slow
    num_timed_out = sum(result.status == "timeout" for result in results)
    assert seconds < (num_timed_out * (TIMEOUT_S + SLACK_S) + 60) / 2 + 30
    assert not list(tmp_path.iterdir())
    right = {name for name, result in said.items() if result.parts.get("accuracy")}
    assert right <= SAY_42


@pytest.mark.timeout(240)
@pytest.mark.parametrize("per_program", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_programs_do_nothing_that_is_forbidden(
    tmp_path: Path, server: socket.socket, monkeypatch: pytest.MonkeyPatch, per_program: int
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", SECRET)
    marker, victim = tmp_path / "marker", tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    before = (victim / "file").stat()
    programs = forbidden_programs(
        str(marker),
        str(victim),
        server.getsockname()[1],
        os.getpid(),
        is_reading_limited="landlock" in sandbox_layers(),
        per_program=per_program,
    )
    # Ten attacks are one program, and some of them import half of the standard library.
    results = _graded_programs({"control": "print('ESCAPED')", **programs}, test_s=4.0)
    assert results.pop("control").parts["score"] == 1.0
    assert {name for name, result in results.items() if result.parts["score"]} == set(), "escaped"
    unlike = {name: (result.status, result.parse) for name, result in results.items() if not _ran(result)}
    assert not unlike, "each program ran to its end, where it printed something else"
    with pytest.raises(BlockingIOError):
        server.accept()
    assert not marker.exists()
    after = (victim / "file").stat()
    assert (victim / "file").read_text() == "kept" and [path.name for path in victim.iterdir()] == ["file"]
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (before.st_mode, before.st_uid, before.st_mtime_ns)
    assert not [path for folder in ("/", "/tmp", "/dev/shm", "/var/tmp") for path in Path(folder).glob("ESCAPED")]


@pytest.mark.timeout(240)
def test_programs_meet_their_limits() -> None:
    programs = bombs()
    endless = {name: programs.pop(name) for name in ENDLESS}
    results = _graded_programs(programs) | _graded_programs(endless, ENDLESS_S)
    assert {name: result.error for name, result in results.items() if result.status != "ok"} == {}
    slow = {name: result.seconds for name, result in results.items() if result.seconds > CALL_S}
    assert not slow
    assert {name for name, result in results.items() if result.parts["score"]} == set()
    statuses = {name: result.parse["status"] for name, result in results.items()}
    assert statuses["endless loop that catches all"] == "timeout"
    assert statuses["closes its streams and goes on"] == "timeout"
    assert statuses["threads"] == "threads"
    assert statuses["output"] == statuses["output of errors"] == "output"
    assert statuses["memory"] == "failed"


def _graded_programs(programs: dict[str, str], test_s: float = TEST_S) -> dict[str, ScoringResult]:
    kwargs = {"test_s": test_s, "total_s": 5.0, "memory_mb": 256}
    function = RewardFunctionSpec(DEFAULT_FUNCTION.path, DEFAULT_FUNCTION.name, kwargs)
    pool = ScoringPool(function, num_workers=2, timeout_s=CALL_S)
    try:
        jobs = [
            ScoringJob("code", f"```python\n{program}\n```", ESCAPED, {"name": name})
            for name, program in programs.items()
        ]
        return dict(zip(programs, _graded(pool, jobs), strict=True))
    finally:
        pool.close()


def _graded(pool: ScoringPool, jobs: list[ScoringJob]) -> list[ScoringResult]:
    return [future.result() for future in pool.submit(jobs)]


def _ran(result: ScoringResult) -> bool:
    return result.status == "ok" and result.parse["status"] == "wrong"
