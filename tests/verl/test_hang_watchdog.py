"""A worker's phases are watched as the config says, and a hang is reported in the run's directory."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from tests.parallel.launcher import run_ranks
from verl.trainer.config import load_config, validate_config
from verl.trainer.config.override_text import override
from verl.utils.timeline import Timeline
from verl.workers.phases import make_watchdog, worker_phase


class _Role:
    """One phase, in which rank 1 comes late."""

    def __init__(self, groups: ProcessGroups, report_dir: str) -> None:
        config = load_config(["trainer.hang_timeout_s=1", override("trainer.report_dir", report_dir)])
        self.groups, self.report_dir = groups, Path(report_dir)
        self.watchdog = make_watchdog(config, groups)
        self.timeline = Timeline()

    @worker_phase
    def update_actor(self, late_s: float) -> str:
        deadline = time.monotonic() + late_s
        while self.groups.rank == 1 and time.monotonic() < deadline and not self.reports():
            time.sleep(0.05)
        dist.all_reduce(torch.ones(1))
        return "done"

    def reports(self) -> list[Path]:
        return list(self.report_dir.glob("hang/*/hang-*.txt"))


def _hang(report_dir: str) -> None:
    role = _Role(initialize_model_parallel(), report_dir)
    assert role.update_actor(0) == role.update_actor(late_s=30) == "done"
    assert role.watchdog is not None
    role.watchdog.close()
    overrides = [override("trainer.report_dir", report_dir), "actor_rollout_ref.nccl_timeout=100"]
    assert make_watchdog(load_config([*overrides, "trainer.hang_timeout_s=0"]), role.groups) is None
    by_default = make_watchdog(load_config(overrides), role.groups)
    assert by_default is not None and by_default.timeout_s == 50
    by_default.close()


def test_a_hang_in_a_phase_is_told_in_the_report_directory(tmp_path: Path) -> None:
    run_ranks(_hang, 2, str(tmp_path), timeout_s=60)
    (path,) = tmp_path.glob("hang/*/hang-*.txt")
    text = path.read_text()
    assert "phase 'update_actor' hangs" in text and "hang_timeout_s: 1.0" in text
    assert "rank 0: all_reduce(float32 [1]) over world [0-1]" in text and "rank 1: at tests/verl" in text


def test_every_call_of_the_trainer_is_a_phase() -> None:
    from verl.workers.megatron_workers import ActorRolloutRefWorker  # not in the ranks of the other tests: it is slow

    calls = ("generate_sequences", "compute_log_prob", "compute_ref_log_prob", "update_actor", "export_hf")
    calls += ("save_checkpoint", "load_checkpoint", "wait_for_checkpoint", "verify_checkpoint", "build_models")
    for name in calls:
        assert hasattr(getattr(ActorRolloutRefWorker, name), "__wrapped__"), f"{name} is no worker phase"


def test_a_negative_timeout_is_a_problem() -> None:
    found = validate_config(load_config(["trainer.hang_timeout_s=-1"]))
    assert any("trainer.hang_timeout_s is -1.0; give seconds, or 0 for no watchdog" in problem for problem in found)
