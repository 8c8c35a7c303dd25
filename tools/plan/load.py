"""How unevenly tokens reach the ranks that share the experts: assumed, or measured in a run."""

from __future__ import annotations

import json
from pathlib import Path

BALANCED, WORST = "balanced", "worst"
METRIC = "actor/expert_load_max"


def expert_load(text: str, num_ranks: int) -> float:
    """``balanced`` (1), ``worst`` (all to one of ``num_ranks``), a number, or the largest of a run's metrics.jsonl.

    Raises:
        ValueError: it is none of these, less than 1, or the run did not measure it.
    """
    if text in (BALANCED, WORST):
        return 1.0 if text == BALANCED else float(num_ranks)
    try:
        load = float(text)
    except ValueError:
        load = _measured(Path(text))
    if not load >= 1.0:
        raise ValueError(f"--load {load:g}: the fullest rank has at least the mean; 1 is balanced")
    return load


def _measured(path: Path) -> float:
    if not path.is_file():
        raise ValueError(f"--load {path}: neither {BALANCED}, {WORST} nor a number, and there is no such file")
    try:
        steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        loads = [float(step[METRIC]) for step in steps if METRIC in step]
    except (ValueError, TypeError) as error:
        raise ValueError(f"--load {path}: not a run's metrics.jsonl: {error}") from error
    if not loads:
        raise ValueError(f"--load {path}: no step has {METRIC}; a run measures it with expert parallelism")
    return max(loads)
