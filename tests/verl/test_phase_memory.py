"""Memory of a phase: what the device held at most inside of it, whoever is asked when; and the table of a run."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tools.report.run_data import read_run
from tools.report.summary import closing_summary
from verl.trainer.ppo.metric_utils import compute_rank_metrics
from verl.workers.phase_memory import GIB, PhaseMemory


class Device:
    """The counters of a device's allocator, as torch's device modules give them (the vendor's boundary)."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def hold(self, gib: int) -> None:
        self.now = gib * GIB
        self.peak = max(self.peak, self.now)

    def max_memory_allocated(self) -> int:
        return self.peak

    def max_memory_reserved(self) -> int:
        return self.peak + GIB

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.now


def test_each_phase_has_its_own_peak_and_the_run_keeps_the_largest() -> None:
    device: Any = Device()
    memory = PhaseMemory(device)
    with memory.phase("generate_sequences"):
        device.hold(9)
        device.hold(2)
    with memory.phase("update_actor"):
        with memory.phase("save_checkpoint"):
            device.hold(5)
        device.hold(3)
        inside = memory.take_metrics()
    assert inside["memory/generate_sequences/allocated_gb"] == 9.0
    assert inside["memory/update_actor/allocated_gb"] == 5.0 and inside["memory/update_actor/reserved_gb"] == 6.0
    assert "memory/save_checkpoint/allocated_gb" not in inside, "it is a part of the phase around it"
    assert 0 < inside["memory/update_actor/host_gb"] < 64
    assert memory.most_bytes() == {"allocated": 9 * GIB, "reserved": 10 * GIB}
    assert memory.take_metrics().keys() == {
        f"memory/update_actor/{kind}_gb" for kind in ("allocated", "reserved", "host")
    }


def test_the_cpu_has_host_memory_alone() -> None:
    memory = PhaseMemory(None)
    with memory.phase("update_actor"):
        pass
    assert memory.take_metrics().keys() == {"memory/update_actor/host_gb"}
    with pytest.raises(ZeroDivisionError), memory.phase("compute_log_prob"):
        _ = 1 / 0
    assert memory.take_metrics() == {}, "a phase that failed has no figures, and does not stay open"


def test_ranks_are_compared_by_phase_and_shown_at_the_end(tmp_path: Path) -> None:
    of_rank = {
        0: {"memory/update_actor/allocated_gb": 3.0, "memory/update_actor/host_gb": 9.0},
        1: {"memory/update_actor/allocated_gb": 5.0, "memory/update_actor/host_gb": 1.0},
    }
    metrics = compute_rank_metrics(of_rank)
    assert metrics == {
        "memory/update_actor/allocated_gb": 5.0,
        "memory/update_actor/host_gb": 9.0,
        "memory/update_actor/rank": 1.0,
    }
    steps = [{"step": 1, **metrics}, {"step": 2, **metrics, "memory/update_actor/allocated_gb": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    shown = StringIO()
    Console(width=120, file=shown).print(closing_summary(read_run(tmp_path)))
    [row] = [line.split() for line in shown.getvalue().splitlines() if "update_actor" in line]
    assert row[1:-1] == ["update_actor", "5.00", "9.00", "1"]
