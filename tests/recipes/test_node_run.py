"""What becomes of a run when a stage after the training fails."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from recipes.common.recipe import load_recipe
from tools.launch.head_run import HeadRun
from tools.launch.job import Job, resolve_config
from tools.launch.processes import RunFailed
from tools.launch.roles import find_role
from tools.launch.settings import read_settings
from tools.launch.stages import Stage, closing_stages


def _job(output_dir: Path, recipe: str = "r1_zero") -> Job:
    settings = read_settings(load_recipe(recipe), [], {"OUTPUT_DIR": str(output_dir)})
    return Job(settings, resolve_config(settings))


def test_only_the_report_is_optional(tmp_path: Path) -> None:
    assert {stage.name: stage.is_optional for stage in closing_stages(_job(tmp_path, "math_lighteval"))} == {
        "shards_to_hf": False,
        "report": True,
    }


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        (None, "no metrics.jsonl there"),
        ("", "no step is logged yet"),
        ('{"step": 1, "critic/score/mean": "high"}\n', "critic/score/mean is 'high'"),
    ],
)
def test_a_report_that_fails_is_one_line_and_no_failure(tmp_path: Path, metrics: str | None, why: str) -> None:
    job = _job(tmp_path)
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    out = io.StringIO()
    run = HeadRun(job, find_role(job.settings, job.nnodes), Console(file=out, width=500))
    *_, report = closing_stages(job)
    run._run_stage(report)
    run.processes.end_all()
    (line,) = (line for line in out.getvalue().splitlines() if "The training is complete" in line)
    assert line.startswith("stage Results (pid ") and "ended with exit status 2; its output is in" in line
    assert why in line and "Results done" not in out.getvalue()
    with pytest.raises(RunFailed, match="stage Results .* ended with exit status 2"):
        run._run_stage(Stage(report.name, report.title, report.command))
