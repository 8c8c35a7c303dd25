"""Reads the records of samples that a run left in its directory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from tools.report.run_data import is_finite, read_jsonl, step_files

_TEXT, _NUMBER, _LIST = str, (int, float, type(None)), (list, type(None))
FIELDS: dict[str, Any] = {
    "step": (int, float), "uid": _TEXT, "data_source": _TEXT, "prompt": _TEXT, "ground_truth": object, "tokens": list,
    "rollout_log_probs": _LIST, "log_probs": _LIST, "versions": list, "reward": _NUMBER, "parts": dict,
    "advantage": _NUMBER, "length": _NUMBER, "finish_reason": (str, type(None)),
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
    if not found:
        raise ValueError(f"{folder} has no whole sample of step {', '.join(names)}: its files are empty or cut")
    return found, num_left_out


def _read_step(path: Path) -> list[dict[str, Any]]:
    """The records of a file, null in place of NaN and infinities: a browser's JSON does not have them."""
    loads = partial(json.loads, parse_constant=lambda _: None, parse_float=_finite)
    records = read_jsonl(path, loads=loads)
    for number, record in enumerate(records, start=1):
        where = f"{path}:{number} is no record of a sample"
        if lacking := sorted(FIELDS.keys() - record.keys()):
            raise ValueError(f"{where}; it lacks {lacking}")
        if wrong := [name for name, kinds in FIELDS.items() if not isinstance(record[name], kinds)]:
            raise ValueError(f"{where}; {wrong[0]} is {record[wrong[0]]!r:.100}")
        if not record["versions"] or not all(map(_is_run, record["versions"])):
            raise ValueError(f"{where}; versions is {record['versions']!r:.100}, expected [version, tokens] pairs")
    return records


def _is_run(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(map(is_finite, found))


def _finite(text: str) -> float | None:
    return float(text) if is_finite(float(text)) else None
