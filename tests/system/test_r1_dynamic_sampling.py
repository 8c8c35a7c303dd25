"""The whole job of recipes/r1_dynamic_sampling, small: sets by name, filter by path, two updates, two FP8 engines."""

from __future__ import annotations

from pathlib import Path

from tests.pages import undocumented
from tests.system.command import read_metrics
from tests.system.jobs import Job, prepare_r1_dynamic_sampling

STEPS = 2


def test_from_json_lines_to_a_policy(tmp_path: Path) -> None:
    job = Job(prepare_r1_dynamic_sampling(tmp_path), tmp_path, STEPS)
    job.finish()
    run = job.output_dir
    steps = read_metrics(run)
    assert undocumented(name for step in steps for name in step) == []
    assert [step["step"] for step in steps] == [*range(STEPS + 1)]
    for step in steps[1:]:
        assert step["train/num_gen_batches"] == 1 and step["train/dropped_surplus_groups"] > 0
        assert step["actor/grad_norm"] >= 0
    assert {"val/score", "val/sums/score", "val/comparisons/response_length"} <= steps[0].keys()
    assert (run / "report.html").is_file()
