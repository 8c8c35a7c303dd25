"""A plan as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from recipes.common.atomic_files import write_text_atomically
from tools.plan.rank_plan import RankPlan
from tools.plan.timing import StepTime
from tools.plan.whole import WholePlan


def write_json(plan: WholePlan, step: StepTime | None, path: Path) -> None:
    """Writes the plan whole or not at all."""
    write_text_atomically(path, json.dumps(as_json(plan, step), indent=1) + "\n")


def as_json(plan: WholePlan, step: StepTime | None) -> dict[str, Any]:
    """Bytes and seconds; of the calls only numbers."""
    run = plan.run
    return {
        "name": run.name,
        "device": dataclasses.asdict(run.device),
        "num_devices": run.config.trainer.world_size,
        "num_parameters": plan.num_parameters,
        "rows": dataclasses.asdict(plan.size),
        "problems": list(plan.problems),
        "warnings": plan.warnings,
        "host_bytes_of_fullest_node": plan.host_bytes if plan.stages else None,
        "stages": [_stage(rank) for rank in plan.stages],
        "traffic": plan.traffic,
        "step": None
        if step is None
        else {
            "seconds": step.seconds,
            "total_s": step.total_s,
            "terms": {phase: dict(terms) for phase, terms in step.terms.items()},
            "tokens_per_s_device": step.tokens_per_s_device,
        },
    }


def _stage(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "stage": rank.coords.pp,
        "num_parameters": rank.num_parameters,
        "device_state": rank.device_state,
        "host_state": rank.host_state,
        "phases": [dataclasses.asdict(phase) for phase in rank.phases],
        "calls": {calls.phase: len(calls) for calls in rank.calls},
        "weight_sync": rank.sync_bytes,
    }
