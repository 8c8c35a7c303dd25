"""A profile of the third step of a run: what it holds, which files there are, and memory by phase and rank."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.profiles import assert_whole_step
from tests.ray_workers import ray_with_forked_workers
from tests.system.command import read_metrics
from tests.system.in_process import fit, in_process_config
from tests.system.jobs import Prepared
from tools.report.run_data import read_run
from tools.report.summary import closing_summary

PROFILE = (
    "global_profiler.tool=torch",
    "global_profiler.steps=[3]",
    "actor_rollout_ref.actor.profiler.enable=True",
    "actor_rollout_ref.actor.profiler.ranks=[1]",
)
OPS = {"aten::linalg_vector_norm", "aten::mm"}  # the norm is of the update; the products are the rollout's too
QUIET = ("trainer.save_freq=-1", "trainer.save_last=False", "trainer.export_hf=False", "data.val_max_samples=4")
PHASES = ("generate_sequences", "compute_ref_log_prob", "update_actor")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_third_step_is_recorded_and_no_other(prepared: Prepared, tmp_path: Path) -> None:
    """Without a profiler: no folder, and no call of the workers (test_step_profiles)."""
    with ray_with_forked_workers(num_cpus=2):
        for name, keys in (("profiled", PROFILE), ("plain", ())):
            fit(in_process_config(prepared, tmp_path / name, 2, 3, *QUIET, *keys))
    assert not (tmp_path / "plain" / "profile").exists()
    files = [path for path in (tmp_path / "profiled" / "profile").rglob("*") if path.is_file()]
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        "profiled/profile/step_3/actor_rollout_ref_rank_1.json.gz"
    ]
    assert_whole_step(files[0], OPS, without=frozenset({"compute_log_prob"}))  # each step makes one update
    steps = {name: read_metrics(tmp_path / name) for name in ("profiled", "plain")}
    compared = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")
    assert [[step.get(key) for key in compared] for step in steps["profiled"]] == [
        [step.get(key) for key in compared] for step in steps["plain"]
    ], "a profile changes nothing of the training"
    shown = StringIO()
    Console(width=120, file=shown).print(closing_summary(read_run(tmp_path / "plain")))
    for phase in PHASES:
        assert steps["plain"][-1][f"memory/{phase}/host_gb"] > 0, json.dumps(steps["plain"][-1])
        assert 0 <= steps["plain"][-1][f"memory/{phase}/rank"] < 2
        assert phase in shown.getvalue()
