"""Decode steps that are counted and not scheduled leave the same behind as the scheduler itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.plan import generation_steps
from tools.plan.generation_steps import Step, Steps, Workload, count_steps
from vllm.config import SchedulerConfig


def without_blocks(steps: Steps) -> Steps:
    """Which blocks a row has is the order in which they were asked for; how many is not."""

    def plain(step: Step | None) -> Step | None:
        if step is None:
            return None
        rows = (replace(row, block_ids=tuple(range(len(row.block_ids)))) for row in step.rows)
        return Step(tuple(rows), tuple(sorted((0, 0) for _ in step.block_copies)))

    return replace(steps, prefill=plain(steps.prefill), decode=plain(steps.decode))


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize(
    ("rows", "samples", "prompt", "response", "num_blocks", "max_seqs"),
    [
        (16, 4, 40, 300, 1000, 16),  # all together
        (16, 4, 40, 300, 1000, 5),  # some wait for others to end
        (16, 4, 40, 300, 100, 16),  # the cache runs full: rows are put off and computed again
        (7, 1, 33, 150, 26, 7),
        (8, 2, 16, 1, 100, 4),  # nothing is decoded
        (8, 2, 16, 2, 100, 4),
    ],
)
def test_skipped_steps_are_the_schedulers(
    rows: int,
    samples: int,
    prompt: int,
    response: int,
    num_blocks: int,
    max_seqs: int,
    shares_prefixes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for chunked, budget in ((True, 64), (True, 256), (False, 512)):  # without chunks a step holds the longest row
        scheduler = SchedulerConfig(max_seqs, budget, enable_chunked_prefill=chunked)
        load = Workload(rows, samples, prompt, response, num_blocks, 16, shares_prefixes, scheduler, 1)
        counted = count_steps(load)
        with monkeypatch.context() as patch:
            patch.setattr(generation_steps, "_steps_alike", lambda scheduler, load: 0)  # every step is scheduled
            assert without_blocks(counted) == without_blocks(count_steps.__wrapped__(load))
