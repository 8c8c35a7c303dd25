"""The ledger of all grades: the prompt, the response, its score, and the version of the grader that gave it.

A step has a file ``step_N.jsonl`` and a validation ``val_step_N.jsonl``, with one line per response. A line holds
everything that a grader needs, so that ``python -m tools.regrade`` can grade it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.trainer.ppo.observers import Step, StepFiles
from verl.workers.reward_manager import GradedSample

FOLDER = "reward_ledger"


class RewardLedger(StepFiles):
    """Writes a file per step, atomically.

    Args:
        report_dir: where the run writes; the ledger is in ``reward_ledger/`` there.
        contents: ``reward_model.ledger``.
    """

    def __init__(self, report_dir: str, contents: str) -> None:
        super().__init__(Path(report_dir) / FOLDER, "*step_*.jsonl")
        self._contents = contents
        self._samples: list[GradedSample] = []

    def add(self, samples: Sequence[GradedSample]) -> None:
        """Collects grades for the step's file; a step may grade several batches."""
        if self._contents != "off":
            self._samples += samples

    def after_rewards(self, step: Step) -> None:
        self.write(step.number)

    def write(self, step: int) -> None:
        """Writes the file of one step with the grades since the last, if any; it is on disk when this returns."""
        samples, self._samples = self._samples, []
        self._write(f"step_{step}.jsonl", step, samples)

    def write_validation(self, step: int, samples: Sequence[GradedSample]) -> None:
        """Writes the file of one validation; grades that are collected meanwhile are the next step's."""
        self._write(f"val_step_{step}.jsonl", step, samples)

    def _write(self, name: str, step: int, samples: Sequence[GradedSample]) -> None:
        if self._contents != "off" and samples:
            lines = (json.dumps(_record(step, sample, self._contents)) + "\n" for sample in samples)
            self.write_file(name, "".join(lines))


def _record(step: int, sample: GradedSample, contents: str) -> dict[str, Any]:
    job, result = sample.job, sample.result
    assert result.function is not None
    texts = {"prompt": sample.prompt, "response": job.solution_str}
    if contents == "references":
        texts = {f"{name}_sha256": hashlib.sha256(_bytes(text)).hexdigest() for name, text in texts.items()}
    return {
        "uid": sample.uid,
        "step": step,
        "data_source": job.data_source,
        **texts,
        "ground_truth": job.ground_truth,
        "extra_info": job.extra_info,
        "score": result.parts["score"],
        "parts": result.parts,
        "parse": result.parse,
        "status": result.status,
        "error": result.error,
        "seconds": round(result.seconds, 4),
        "grader": {
            "path": result.function.path,
            "name": result.function.name,
            "kwargs": result.function.kwargs,
            "version": result.version,
        },
    }


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")
