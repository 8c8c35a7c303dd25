"""Reads a run directory: metrics, validation transcripts, the data report, restarts of workers, changes at a resume."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.cores import THREADS

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
        """(step, value) of every step that logged ``name``."""
        return [(int(row["step"]), row[name]) for row in self.metrics if name in row]

    def seconds(self) -> float:
        """Seconds of all steps, validations and saves."""
        parts = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
        return sum(row.get(name, 0.0) for row in self.metrics for name in parts)


def read_run(run_dir: Path) -> RunData:
    """Read ``run_dir``; ValueError when it has no metrics. A half-written last line is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"--run-dir {run_dir}: no metrics.jsonl there; give a run's OUTPUT_DIR (trainer.report_dir)")
    metrics = read_jsonl(path)
    if not metrics:
        raise ValueError(f"{path}: no step is logged yet; run the report after the first step")
    for number, row in enumerate(metrics, start=1):
        if not isinstance(row, dict) or "step" not in row or not all(isinstance(v, int | float) for v in row.values()):
            raise ValueError(f"{path}, line {number} is no step's metrics: expected numbers by name, step among them")
    files = step_files(run_dir / "val_generations")
    generations = {step: read_jsonl(file) for step, file in files.items()}
    report = run_dir / "data" / "data_report.json"
    data_report = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else None
    restarts, changes = (read_jsonl(run_dir / name) for name in ("restarts.jsonl", "changes.jsonl"))
    return RunData(run_dir, metrics, generations, data_report, restarts, changes)


def step_files(folder: Path) -> dict[int, Path]:
    """The files ``step_N.jsonl`` of a folder by step, in order."""
    matches = {path: _STEP_FILE.fullmatch(path.name) for path in folder.glob("step_*.jsonl")}
    return dict(sorted((int(match[1]), path) for path, match in matches.items() if match))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file, none when it is not there; ValueError names a file or line that is not JSON.

    A crash in the middle of a write leaves half a last line, which is left out.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return found


def changed(change: dict[str, Any]) -> list[str]:
    """What a resume changed: the reward, the data, the algorithm, the threads of a worker."""
    keys = {entry["key"].split(".")[0] for entry in change["changes"]}
    kinds = {"custom_reward_function": "reward", "reward_model": "reward", "data": "data", THREADS: "threads"}
    found = {kinds.get(key, "algorithm") for key in keys}
    return [kind for kind in ("reward", "data", "algorithm", "threads") if kind in found]
