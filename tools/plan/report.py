"""A plan as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from hf_formats.files import write_text
from tools.plan.timing import StepTime
from tools.plan.whole import WholePlan


def write_json(plan: WholePlan, step: StepTime, path: Path) -> None:
    """Writes bytes and seconds, and of the calls only numbers; the file is written whole or not at all."""
    run = plan.run
    stages = [
        {
            "rank": rank.rank,
            "stage": rank.coords.pp,
            "num_parameters": rank.num_parameters,
            "device_state": rank.device_state,
            "host_state": rank.host_state,
            "phases": [asdict(phase) for phase in rank.phases],
            "calls": {calls.phase: calls.count for calls in rank.calls},
            "weight_sync": rank.sync_bytes,
            "launches": [asdict(launches) for launches in rank.launches],
        }
        for rank in plan.stages
    ]
    values = {
        "name": run.name,
        "device": asdict(run.device),
        "num_devices": run.config.trainer.world_size,
        "num_parameters": plan.num_parameters,
        "rows": asdict(plan.size),
        "problems": list(plan.problems),
        "warnings": plan.warnings,
        "host_bytes_of_fullest_node": plan.host_bytes if plan.stages else None,
        "stages": stages,
        "traffic": plan.traffic,
        "step": {
            "seconds": step.seconds,
            "total_s": step.total_s,
            "terms": step.terms,
            "tokens_per_s_device": step.tokens_per_s_device,
        },
    }
    write_text(path, json.dumps(values, indent=1) + "\n")
