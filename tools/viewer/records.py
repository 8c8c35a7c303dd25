"""Reads the records of samples that a run left in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.report.run_data import step_files

FIELDS = {
    "step", "uid", "data_source", "prompt", "ground_truth", "tokens", "rollout_log_probs", "log_probs", "versions",
    "reward", "parts", "advantage", "length", "finish_reason",
}  # fmt: skip


def read_records(run_dir: Path, steps: str | None, max_samples: int) -> tuple[list[dict[str, Any]], int]:
    """Records of whole steps, newest step first, ``max_samples`` at most, and how many did not fit.

    Raises:
        ValueError: nothing was saved, a step is not there, or a file is damaged; the text says what to do.
    """
    if max_samples < 1:
        raise ValueError(f"--max-samples {max_samples}: it must be at least 1")
    folder = run_dir / "samples"
    files = step_files(folder)
    if not files:
        raise ValueError(
            f"{folder} has no step_N.jsonl: give a run's OUTPUT_DIR, of a run with "
            "trainer.log_samples_freq=N, after its first recorded step"
        )
    names = list(map(str, files)) if steps is None else steps.split(",")
    missing = [name for name in names if not name.strip().isdecimal() or int(name) not in files]
    if missing:
        there = ", ".join(map(str, files))
        raise ValueError(f"--steps: {', '.join(missing)} is not recorded; {folder} has {there}")
    found: list[dict[str, Any]] = []
    num_left_out = 0
    for step in sorted(set(map(int, names)), reverse=True):
        records = _read_step(files[step])
        room = max_samples - len(found)
        found += records[:room]
        num_left_out += max(0, len(records) - room)
    return found, num_left_out


def _read_step(path: Path) -> list[dict[str, Any]]:
    records = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(record, dict) or not record.keys() >= FIELDS:
            lacking = sorted(FIELDS - record.keys()) if isinstance(record, dict) else "everything"
            raise ValueError(f"{path}:{number} is no record of a sample; it lacks {lacking}")
        records.append(record)
    return records
