"""The run's own record of its metrics: metrics.jsonl with each step once, and one console line a step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from hf_formats.files import write_text

# (metric, format) of the console line; the other metrics are only in the files.
_CONSOLE = (
    ("val/score", "val {:.3f}"),
    ("critic/score/mean", "score {:.3f}"),
    ("reward/format", "format {:.2f}"),
    ("reward/accuracy", "accuracy {:.2f}"),
    ("response_length/mean", "len {:.1f}"),
    ("actor/entropy", "entropy {:.3f}"),
    ("actor/kl_loss", "kl {:.2e}"),
    ("actor/grad_norm", "grad {:.3f}"),
    ("training/rollout_probs_diff_max", "probs_diff_max {:.1e}"),
    ("perf/acceptance_length", "accepted {:.2f}"),
    ("perf/throughput", "{:.0f} tok/s/device"),
    ("perf/cpu_memory_used_gb", "host {:.2f} GB"),
    ("perf/max_memory_allocated_gb", "device {:.2f} GB"),
)
_PHASES = (
    "gen",
    "update_weights",
    "reward",
    "old_log_prob",
    "ref",
    "update_actor",
    "save_checkpoint",
    "testing",
    "step",
)


class MetricsFile:
    """``metrics.jsonl`` in ``directory``: one object a step, in order, each step once.

    Args:
        first_step: the step after the checkpoint that is resumed; lines of it and later are removed, because those
            steps will be run again.
    """

    def __init__(self, directory: str, first_step: int) -> None:
        path = Path(directory) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_back(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Writes the metrics of one step; they are on disk when this returns."""
        self._file.write(json.dumps({"step": step, **data}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, *, is_done: bool = True) -> None:
        self._file.close()


def console_line(metrics: Mapping[str, float], step: int) -> str:
    parts = [f"step {step}"] + [text.format(metrics[name]) for name, text in _CONSOLE if name in metrics]
    phases = [f"{phase} {metrics[f'timing_s/{phase}']:.1f}" for phase in _PHASES if f"timing_s/{phase}" in metrics]
    return " | ".join(parts + ([f"s: {' '.join(phases)}"] if phases else []))


def cut_back(path: Path, first_step: int) -> None:
    """Removes the lines of ``first_step`` and later and a half-written last line from ``path``; atomic."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # a crash in the middle of a line: it is the last one
        if record["step"] >= first_step:
            break
        kept.append(line + "\n")
    write_text(path, "".join(kept))
