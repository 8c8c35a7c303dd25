"""Bar 4 of operation: the whole job killed with SIGKILL at any moment, in every recipe, ends as an undisturbed one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.system.command import Command
from tests.system.jobs import PREPARE, Job, Prepared, assert_same_result

KILLS = 20
STEPS_OF_KILLS = 40
LONGEST_LIFE_S = 3.0  # from the moment that it trains; a step with its checkpoint takes about one
SEED = 20

pytestmark = pytest.mark.timeout(3000)  # many runs of the whole job; each wait has its own limit

slow = pytest.mark.slow


def live_and_die(job: Job, name: str, life_s: float) -> None:
    """Starts the job, and kills every process of it at once, ``life_s`` after it has begun or gone on to train."""
    with job.command(name) as command:
        command.wait_for(lambda: is_training(command), "the first step")
        time.sleep(life_s)
        command.end()
    print(f"{name}: killed after {life_s:.2f} s of training, newest checkpoint {job.newest_step}")


def is_training(command: Command) -> bool:
    """Whether it has said what it goes on from, or that it begins."""
    return any(text in command.text() for text in ("resumed after step", "starting from the model's weights"))


@pytest.mark.parametrize("recipe", ["r1_zero", *(pytest.param(name, marks=slow) for name in list(PREPARE)[1:])])
def test_some_steps_a_kill_and_the_rest_are_the_whole_run(
    recipe: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """N + M equals N, kill -9 of everything, M: in the middle of step 3."""
    if recipe == "r1_zero":
        prepared, whole = request.getfixturevalue("prepared"), request.getfixturevalue("uninterrupted")
    else:
        prepared = PREPARE[recipe](tmp_path)
        whole = Job(prepared, tmp_path / "whole")
        whole.finish()
    job = Job(prepared, tmp_path / "killed")
    with job.command("first") as command:
        command.wait_for(lambda: job.newest_step == 2, "checkpoint 2")
        time.sleep(0.5)
        command.end()
    assert 2 <= job.newest_step < job.steps
    job.finish()
    assert_same_result(job, whole)


@slow
@pytest.mark.parametrize("recipe", PREPARE)
def test_twenty_kills_at_random_moments_lose_and_repeat_nothing(recipe: str, tmp_path: Path) -> None:
    """Metrics and ledger have every step and sample once and as if nothing had happened, and so are the weights."""
    prepared: Prepared = PREPARE[recipe](tmp_path)
    whole, job = (Job(prepared, tmp_path / name, STEPS_OF_KILLS) for name in ("whole", "killed"))
    whole.finish()
    moments = random.Random(SEED)
    for kill in range(KILLS):
        live_and_die(job, f"kill_{kill + 1}", moments.uniform(0, LONGEST_LIFE_S))
        assert job.newest_step < STEPS_OF_KILLS, "it must not end before the last kill"
    job.finish()
    assert_same_result(job, whole)
