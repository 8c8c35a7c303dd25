"""Reads a run directory: metrics, validation transcripts, the data report, restarts of workers, changes at a resume."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_formats.cores import THREADS

MOST_BYTES = 2**18  # that are read of a step's samples
LARGEST = 1e300  # of a value that a figure has room for
_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True)
class RunData:
    """What a run reports: ``metrics`` has one dict per logged step, in order, each with its ``step``."""

    run_dir: Path
    metrics: list[dict[str, float]]
    generations: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # step -> transcripts
    data_report: dict[str, Any] | None = None
    restarts: list[dict[str, Any]] = field(default_factory=list)  # ``step``, ``from_step``, ``cause`` of each
    changes: list[dict[str, Any]] = field(default_factory=list)  # ``step`` and ``changes`` of each resume with others

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every step that logged ``name`` as a finite number."""
        return [(step, value) for step, value in self.curve(name) if not math.isnan(value)]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every step that logged ``name``; NaN, a gap, where it is no finite number."""
        found = ((row["step"], row[name]) for row in self.metrics if name in row)
        return [(int(step), float(value) if is_finite(value) else math.nan) for step, value in found]

    def seconds(self) -> float:
        """Seconds of all steps, validations and saves."""
        parts = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
        return sum(value for name in parts for _, value in self.series(name))


def read_run(run_dir: Path) -> RunData:
    """Read ``run_dir``; ValueError when it has no metrics or a file is damaged. A cut last line is left out.

    NaN, infinities and null may stand in place of a number.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"--run-dir {run_dir}: no metrics.jsonl there; give a run's OUTPUT_DIR (trainer.report_dir)")
    metrics = read_jsonl(path)
    if not metrics:
        raise ValueError(f"{path}: no step is logged yet; run the report after the first step")
    for number, row in enumerate(metrics, start=1):
        texts = {name: value for name, value in row.items() if value is not None and not isinstance(value, int | float)}
        if texts or not is_finite(row.get("step")):
            where = f"{path}, record {number} is no step's metrics: expected numbers by name, step among them"
            raise ValueError(where + "".join(f"; {name} is {value!r}" for name, value in list(texts.items())[:1]))
    files = step_files(run_dir / "val_generations")
    generations = {step: rows for step, file in files.items() if (rows := read_jsonl(file))}
    restarts, changes = (
        read_jsonl(run_dir / name, has) for name, has in (("restarts.jsonl", _is_step), ("changes.jsonl", _is_change))
    )
    return RunData(run_dir, metrics, generations, _data_report(run_dir), restarts, changes)


def is_finite(value: object) -> bool:
    """Whether ``value`` is a number that a figure has room for."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def _data_report(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / "data" / "data_report.json"
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    lists = [report.get(name, []) for name in ("skipped", "duplicates", "over_long")] if _is_object(report) else []
    if not lists or not all(isinstance(rows, list) for rows in lists) or not all(map(_is_skipped, lists[0])):
        raise ValueError(f"{path} is no data report: expected an object as the recipe's data script writes it")
    return dict(report)


def _is_object(found: Any) -> bool:
    return isinstance(found, dict)


def _is_step(found: Any) -> bool:
    return _is_object(found) and is_finite(found.get("step"))


def _is_skipped(found: Any) -> bool:
    return _is_object(found) and is_finite(found.get("index")) and "reason" in found


def _is_change(found: Any) -> bool:
    entries = found.get("changes") if _is_step(found) else None
    return isinstance(entries, list) and all(
        _is_object(entry) and isinstance(entry.get("key"), str) and {"was", "now"} <= entry.keys() for entry in entries
    )


def step_files(folder: Path) -> dict[int, Path]:
    """The files ``step_N.jsonl`` of a folder by step, in order."""
    matches = {path: _STEP_FILE.fullmatch(path.name) for path in folder.glob("step_*.jsonl")}
    return dict(sorted((int(match[1]), path) for path, match in matches.items() if match))


def latest_samples(run_dir: Path) -> tuple[int, list[dict[str, Any]]]:
    """The newest training step with grades on disk, 0 without one, and its first samples as the reward ledger has them.

    ValueError when the file is damaged.
    """
    files = step_files(run_dir / "reward_ledger")
    if not files:
        return 0, []
    step = max(files)
    with files[step].open("rb") as stream:
        *lines, _ = stream.read(MOST_BYTES).split(b"\n")
    return step, [record for record in map(json.loads, lines) if _is_object(record)]


def read_jsonl(
    path: Path, is_record: Callable[[Any], bool] = _is_object, loads: Callable[[str], Any] = json.loads
) -> list[dict[str, Any]]:
    """The records of a file, none when it is not there; ValueError names a line that is not one.

    A crash in the middle of a write leaves half a last line, which is left out.
    """
    lines = path.read_bytes().rstrip(b"\n").split(b"\n") if path.is_file() else []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = loads(line.decode())
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            continue
        if not is_record(record):
            raise ValueError(f"{path}, line {number} is no record of this file: {line[:100].decode(errors='replace')}")
        found.append(record)
    return found


def changed(change: dict[str, Any]) -> list[str]:
    """What a resume changed: the reward, the data, the algorithm, the threads of a worker."""
    keys = {entry["key"].split(".")[0] for entry in change["changes"]}
    kinds = {"custom_reward_function": "reward", "reward_model": "reward", "data": "data", THREADS: "threads"}
    found = {kinds.get(key, "algorithm") for key in keys}
    return [kind for kind in ("reward", "data", "algorithm", "threads") if kind in found]
