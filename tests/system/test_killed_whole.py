"""Bar 4 of operation: the whole job killed with SIGKILL at any moment, in every recipe, ends as an undisturbed one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.system.command import read_metrics
from tests.system.jobs import PREPARE, Job, Prepared, assert_same_result

KILLS = 20
STEPS_OF_KILLS = 40
SEED = 20

pytestmark = pytest.mark.timeout(3000)  # many runs of the whole job; each wait has its own limit

slow = pytest.mark.slow


def live_and_die(job: Job, name: str, num_steps: int, life_s: float) -> None:
    """Starts the job, and kills all of it at once, ``life_s`` after it began or ``num_steps`` more ended."""
    goal = job.newest_step + num_steps
    with job.command(name) as command:
        command.wait_for(lambda: command.is_training() and job.newest_step >= goal, f"step {goal}")
        time.sleep(life_s)
        command.end()
    print(f"{name}: killed {life_s:.2f} s after step {goal}, newest checkpoint {job.newest_step}")


@slow  # test_resume_after_kill.py kills the driver of one of them
@pytest.mark.parametrize("recipe", PREPARE)
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
    of_steps = [step["timing_s/step"] for step in read_metrics(whole.output_dir) if step["step"]]
    moments = random.Random(SEED)
    for kill in range(KILLS):
        life_s = moments.uniform(0, 1.5 * sum(of_steps) / len(of_steps))  # validations and checkpoints come on top
        live_and_die(job, f"kill_{kill + 1}", moments.randint(0, 1), life_s)
        assert job.newest_step < STEPS_OF_KILLS, "it must not end before the last kill"
    job.finish()
    assert_same_result(job, whole)
