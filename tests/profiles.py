"""What a profile of a training step must hold, by the names and times of its events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PHASES = {"generate_sequences", "compute_log_prob", "compute_ref_log_prob", "update_actor"}
PARTS = {"prefill", "decode", "forward_backward", "optimizer_step", "weight_sync"}
MICRO_BATCHES = {"micro_batch 0 forward", "micro_batch 0 backward"}
# A range in each engine: what it computes lies inside of it.
ENGINES = {"rollout": "decode", "training": "micro_batch 0 forward"}
_OPS = ("aten::", "npu::")


def complete_events(trace: Path) -> list[dict[str, Any]]:
    """The complete events of a Chrome trace, an object or a list of events."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    content = json.loads(text)
    events = content["traceEvents"] if isinstance(content, dict) else content
    found = [event for event in events if event.get("ph") == "X"]
    # What chrome://tracing and Perfetto need of each.
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in found)
    return found


def event_names(trace: Path) -> set[str]:
    return {event["name"] for event in complete_events(trace)}


def ops_within(events: list[dict[str, Any]], name: str) -> set[str]:
    """Names of the ops that begin while a range called ``name`` lasts, on its thread."""
    ranges = [
        (e["pid"], e["tid"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e["name"] == name
    ]
    return {
        event["name"]
        for event in events
        if event["name"].startswith(_OPS)
        and any(
            (event["pid"], event["tid"]) == (pid, tid) and start <= float(event["ts"]) < end
            for pid, tid, start, end in ranges
        )
    }


def assert_whole_step(trace: Path, ops: set[str], without: frozenset[str] = frozenset()) -> None:
    """The phases of a step (``without`` those it has not), their parts, the micro-batches, and ops of both engines."""
    events = complete_events(trace)
    missing = (PHASES | PARTS | MICRO_BATCHES | ops) - without - {event["name"] for event in events}
    assert not missing, f"{trace} has no {sorted(missing)}"
    for engine, name in ENGINES.items():
        assert len(ops_within(events, name)) >= 5, f"{trace} has no ops of the {engine} engine in '{name}'"
