"""What a profile of a training step must hold, by the names of its events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

PHASES = {"generate_sequences", "compute_log_prob", "compute_ref_log_prob", "update_actor"}
PARTS = {"prefill", "decode", "forward_backward", "optimizer_step", "weight_sync"}
MICRO_BATCHES = {"micro_batch 0 forward", "micro_batch 0 backward"}


def event_names(trace: Path) -> set[str]:
    """Names of the complete events of a Chrome trace, an object or a list of events."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    content = json.loads(text)
    events = content["traceEvents"] if isinstance(content, dict) else content
    return {event["name"] for event in events if event.get("ph") == "X"}


def assert_whole_step(trace: Path, ops: set[str]) -> None:
    """The phases of a step, their parts, the micro-batches, and ``ops`` of both engines."""
    missing = (PHASES | PARTS | MICRO_BATCHES | ops) - event_names(trace)
    assert not missing, f"{trace} has no {sorted(missing)}"
