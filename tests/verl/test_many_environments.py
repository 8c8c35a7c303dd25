"""Many environments beside one engine: it decodes whenever one has answered, and none outlives its limit."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.launcher import run_ranks
from tests.verl.test_turns import config, folder, prompts, rollout, settings
from verl.experimental.agent_loop.environment import EnvironmentSpec
from verl.workers.rollout.rollout_messages import TURNS

__all__ = ["folder"]  # a fixture

SLEEPERS = '''
import asyncio, random, time

class Sleeper:
    """Answers after 0 to 20 seconds, mostly soon, and says when."""

    takes_token_ids = True

    def begin(self, row, seed):
        self.random, self.left = random.Random(1000 * seed + int(row["name"])), row["turns"]
        return [self.random.randint(2, 200) for _ in range(4)]

    async def reset(self, row, seed):
        return self.begin(row, seed)

    def delay_s(self):
        return min(20.0, 0.2 * self.random.paretovariate(1.2) - 0.2)

    def answer(self):
        self.left -= 1
        return [self.random.randint(2, 200)], 0.0, self.left == 0, {"ready_s": time.monotonic()}

    async def step(self, action):
        await asyncio.sleep(self.delay_s())
        return self.answer()

class Blocking(Sleeper):
    def reset(self, row, seed):
        return self.begin(row, seed)

    def step(self, action):
        time.sleep(self.delay_s())
        return self.answer()
'''
LIMIT_S = 4.0
Span = tuple[float, float]


def union(spans: list[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def seconds_of_both(first: list[Span], second: list[Span]) -> float:
    """Of two lists of spans that do not overlap."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return sum(max(0.0, end - begin) for begin, end in pairs)


def peak_mib(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def generated(folder: str, name: str, count: int, num_processes: int) -> Any:
    environment = EnvironmentSpec(f"{folder}/sleepers.py", name)
    given = replace(settings(folder), environment=environment, timeout_s=LIMIT_S, num_processes=num_processes)
    made = rollout(folder, config(response_length=64, max_num_seqs=64, num_gpu_blocks_override=2048), given)
    engine, host, steps, waits, seconds = made.inference_engine.engine, made._host, [], [], []
    step, replies = engine._step, host.replies

    def timed_step(*arguments: Any) -> Any:
        begin_s, is_busy = time.monotonic(), engine.core.scheduler.has_unfinished
        found = step(*arguments)
        steps.extend([(begin_s, time.monotonic())] if is_busy else [])
        return found

    def timed_replies(channel: str) -> Any:
        found = replies(channel)
        for reply in found:
            if "error" not in reply:
                seconds.append(reply["seconds"])
            if ready_s := reply.get("info", {}).get("ready_s"):
                waits.append((ready_s, time.monotonic()))
        return found

    engine._step, host.replies = timed_step, timed_replies
    batch = made.generate_sequences(prompts([3] * count))
    columns = batch.non_tensor_batch
    processes = [host._process.pid, *children(host._process.pid)]
    memory = [peak_mib(pid) for pid in processes]
    host.close()
    total_s = steps[-1][1] - steps[0][0]
    steps = union(steps)
    idle = [(end, begin) for (_, end), (begin, _) in itertools.pairwise(steps)]
    share = seconds_of_both(idle, union(waits)) / total_s
    decoding = sum(end - begin for begin, end in steps) / total_s
    return share, decoding, total_s, columns["finish_reason"].tolist(), columns[TURNS].tolist(), seconds, memory


def check(found: Any, count: int) -> None:
    share, decoding, total_s, reasons, records, seconds, memory = found
    ended = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    print(
        f"idle while a sample can decode {share:.2%}, decoding {decoding:.2%} of {total_s:.1f} s; {ended}; "
        f"longest call {max(seconds):.2f} s; MiB {[round(peak) for peak in memory]}"
    )
    assert len(reasons) == count and ended.keys() <= {"stop", "length", "environment_timeout"}
    assert ended["stop"] > 0.5 * count
    assert share < 0.5  # beside other tests; on two cores of its own 0.05
    assert max(seconds) < 2 * LIMIT_S  # they would take up to 20 s; beside other tests it is late
    late = [record for record, reason in zip(records, reasons, strict=True) if reason == "environment_timeout"]
    assert all("took more than" in record["problem"] for record in late)
    assert max(memory) < 600


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Sleeper", 32),
        *(pytest.param(name, count, marks=pytest.mark.slow) for name, count in (("Blocking", 64), ("Sleeper", 2000))),
    ],
)
@pytest.mark.timeout(300)
def test_decoding_waits_for_no_environment_while_another_has_answered(folder: str, name: str, count: int) -> None:
    (Path(folder) / "sleepers.py").write_text(SLEEPERS)
    [found] = run_ranks(generated, 1, folder, name, count, 16, timeout_s=280)
    check(found, count)
