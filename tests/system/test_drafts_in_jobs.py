"""Jobs whose rollouts verify drafts, killed and resumed, end as those without drafts that nothing disturbs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.command import read_metrics
from tests.system.jobs import PREPARE, Job, assert_same_result
from tests.system.test_resume_after_kill import in_step, kill_driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # up to seven jobs

PREDICTION = ("actor_rollout_ref.model.mtp.enable=True", "actor_rollout_ref.model.mtp.enable_train=True")
JOBS = {
    "r1_zero": ("mtp", "ngram", "suffix"),
    "math_lighteval": ("ngram", "suffix"),
    "r1_dynamic_sampling": ("ngram", "suffix"),  # which groups come first follows from their lengths
}


@pytest.mark.parametrize("recipe", JOBS)
def test_a_job_with_drafts_ends_as_one_without(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    prepared = PREPARE[recipe](tmp_path / "inputs")
    layer = PREDICTION if "mtp" in JOBS[recipe] else ()
    plain = Job(prepared, tmp_path / "plain", overrides=layer)
    plain.folder.mkdir()
    plain.finish()
    for method in JOBS[recipe]:
        drafts = f"{{method:{method},num_speculative_tokens:3,adaptive:false}}"
        overrides = (*layer, f"actor_rollout_ref.rollout.speculative_config={drafts}")
        job = Job(prepared, tmp_path / method, overrides=overrides)
        job.folder.mkdir()
        with job.command("first") as command:
            kill_driver(command, job, in_step, step=3)
        job.finish()
        lengths = [step["perf/acceptance_length"] for step in read_metrics(job.output_dir)[1:]]
        print(recipe, method, lengths)
        assert all(length > 1 for length in lengths)
        assert_same_result(job, plain)
