"""Environments in processes that hang, crash and lie: each ends its own sample and no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.experimental.agent_loop.environment import EnvironmentSpec
from verl.experimental.agent_loop.environment_pool import EnvironmentFailed, EnvironmentPool, PooledEnvironment

COUNTERS = '''
import asyncio, os, signal, sys, time, random

class Counter:
    """Counts what was added; a word makes it misbehave."""

    async def reset(self, row, seed):
        self.total = seed
        return [{"role": "user", "content": str(self.total)}]

    async def step(self, action):
        await asyncio.sleep(float(os.environ.get("DELAY_S", "0")) * random.random())
        return self.added(action["content"])

    def added(self, word):
        if word == "hang": time.sleep(1000)
        if word == "late": return None
        if word == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if word == "exit": sys.exit(3)
        if word == "raise": raise KeyError("no such key")
        if word == "long": return "x" * (8 << 20), 0.0, False
        if word == "bytes": return b"\\xff\\xfe", 0.0, False
        if word == "reward": return "", float("nan"), False
        if word == "done": return "", 0.0, "yes"
        if word == "print": print("noise"); print("noise", file=sys.stderr); os.write(1, b"noise"); word = "0"
        self.total += int(word)
        return str(self.total), float(self.total), self.total > 100

class Slow(Counter):
    async def step(self, action):
        await asyncio.sleep(1000)

class Tasked(Counter):
    """Counts in a task that its beginning started, as an agent loop does."""

    async def reset(self, row, seed):
        self.words, self.answers = asyncio.Queue(), asyncio.Queue()
        self.task = asyncio.create_task(self.work())
        return await super().reset(row, seed)

    async def work(self):
        while True:
            self.answers.put_nowait(self.added(await self.words.get()))

    async def step(self, action):
        self.words.put_nowait(action["content"])
        return await self.answers.get()

class Blocking(Counter):
    def reset(self, row, seed):
        self.total = seed
        return [{"role": "user", "content": str(self.total)}]

    def step(self, action):
        return self.added(action["content"])

class Dice(Blocking):
    is_deterministic = False
'''
WORDS = {"raise": "KeyError", "bytes": "xff", "reward": "nan", "done": "yes", "late": "None", "exit": "SystemExit"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "counters.py"
    path.write_text(COUNTERS)
    return path


def _run(file: Path, name: str, test: Callable[[EnvironmentPool], Any], **settings: Any) -> None:
    async def with_pool() -> None:
        pool = EnvironmentPool(EnvironmentSpec(str(file), name), **{"num_processes": 2, "timeout_s": 2.0, **settings})
        await pool.start()
        try:
            await asyncio.wait_for(test(pool), 120)
        finally:
            await pool.close()

    asyncio.run(with_pool())


def _say(word: str) -> dict[str, str]:
    return {"role": "assistant", "content": word}


async def _begun(pool: EnvironmentPool, count: int) -> list[PooledEnvironment]:
    environments = [pool.environment({"messages": []}, seed) for seed in range(count)]
    await asyncio.gather(*(one.reset() for one in environments))
    return environments


@pytest.mark.parametrize(
    ("name", "word"),
    [
        *((name, word) for name in ("Counter", "Blocking") for word in (*WORDS, "long", "kill", "hang")),
        *(("Tasked", word) for word in ("kill", "hang")),
    ],
)
def test_one_that_misbehaves_ends_alone(file: Path, name: str, word: str) -> None:
    async def test(pool: EnvironmentPool) -> None:
        bad, *others = await _begun(pool, 6)
        await asyncio.gather(*(one.step(_say("10")) for one in (bad, *others)))
        calls = [bad.step(_say(word)), *(one.step(_say("1")) for one in others)]
        failed, *outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failed, EnvironmentFailed), failed
        assert WORDS.get(word, "") in str(failed)
        assert failed.is_timeout == (word == "hang")
        assert [outcome.reward for outcome in outcomes] == [seed + 11 for seed in range(1, 6)]
        for one in (bad, *others):
            await one.close()

    _run(file, name, test)


def test_a_call_that_waits_too_long_ends_alone(file: Path) -> None:
    async def test(pool: EnvironmentPool) -> None:
        [one] = await _begun(pool, 1)
        start_s = time.monotonic()
        with pytest.raises(EnvironmentFailed, match=r"took more than 2 s") as failed:
            await one.step(_say("1"))
        assert failed.value.is_timeout and time.monotonic() - start_s < 5

    _run(file, "Slow", test)


def test_what_an_environment_prints_is_no_answer(file: Path) -> None:
    async def test(pool: EnvironmentPool) -> None:
        [one] = await _begun(pool, 1)
        assert (await one.step(_say("print"))).reward == 0

    _run(file, "Counter", test)


def test_one_that_is_not_deterministic_has_a_process_of_its_own(file: Path) -> None:
    async def test(pool: EnvironmentPool) -> None:
        first, second = await _begun(pool, 2)
        third = pool.environment({"messages": []}, 3)
        waits = asyncio.create_task(third.reset())
        with pytest.raises(EnvironmentFailed):
            await first.step(_say("kill"))
        assert (await second.step(_say("1"))).reward == 2
        assert not waits.done()
        await first.close()
        await waits
        assert (await third.step(_say("1"))).reward == 4

    _run(file, "Dice", test)


def test_a_class_that_cannot_be_loaded_says_why(file: Path) -> None:
    with pytest.raises(RuntimeError, match="defines no 'Missing'"):
        _run(file, "Missing", lambda pool: None)
