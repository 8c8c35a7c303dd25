"""Saved rollouts: the generated and scored batch of each step on disk, to be trained on later without a rollout engine.

A file ``rollouts/step_N.safetensors`` is complete or absent. It holds every tensor of the batch, B rows in the order in
which they were generated. Its metadata holds the other columns and the metrics of the step's source as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from safetensors import SafetensorError, safe_open

from hf_formats.files import write_bytes
from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.trainer.ppo.metric_utils import marked_timer
from verl.trainer.ppo.observers import Step, StepFiles, steps_of
from verl.trainer.ppo.scores import REWARD_PARTS
from verl.workers.row_store import GENERATED_COLUMNS, STORED_DTYPES, worker_batch

FOLDER, FILES = "rollouts", "step_*.safetensors"
GENERATED_ROW = "generated_row"  # column of a balanced batch: the row's number when it was generated, int64 [B]
_ROW_COLUMNS = ("uid", "data_source", "prompt_text", "finish_reason", REWARD_PARTS)
_CONTROLLER_TENSORS = ("responses", "num_tokens", "token_level_scores")
_DESCRIPTION = "rollouts"  # key of the metadata
_MEASURED = ("timing_s/", "perf/")  # metrics of this run's speed, which another run does not repeat


@dataclass(frozen=True)
class SavedRollout:
    """The batch of one step.

    Attributes:
        rows: ``responses``, ``token_level_scores`` [B, R], ``num_tokens`` [B], and the columns that workers store of
            generated rows, in the types in which they store them.
        metrics: the source's metrics of how the samples came about.
        loader: the state of the loader from which the next step's prompts come.
    """

    rows: DataProto
    metrics: dict[str, float]
    loader: dict[str, int]


class SavedRollouts:
    """The saved rollouts in a folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, step: int, rollout: SavedRollout) -> None:
        """Writes the file of ``step``; it is on disk when this returns."""
        columns = {name: values.tolist() for name, values in rollout.rows.non_tensor_batch.items()}
        described = {"columns": columns, "metrics": rollout.metrics, "loader": rollout.loader}
        tensors = {name: tensor.contiguous() for name, tensor in rollout.rows.batch.items()}
        self.directory.mkdir(parents=True, exist_ok=True)
        content = safetensors.torch.save(tensors, {_DESCRIPTION: json.dumps(described)})
        write_bytes(self._path(step), content)

    def read(self, step: int) -> SavedRollout:
        """Returns the rollout of ``step``; ValueError when there is none, or its file is damaged."""
        path = self._path(step)
        if not path.is_file():
            found = steps_of(self.directory, FILES)
            there = f"steps {found[0]} to {found[-1]}" if found else "none"
            raise ValueError(f"there is no record of step {step}: {path}; {self.directory} has records of {there}")
        try:
            with safe_open(str(path), framework="pt") as opened:
                described = json.loads((opened.metadata() or {})[_DESCRIPTION])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged, or no record of a rollout: {error}") from error
        columns = {name: as_rows(values) for name, values in described["columns"].items()}
        return SavedRollout(DataProto.from_dict(tensors, columns), described["metrics"], described["loader"])

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step}.safetensors"


class RolloutSaver(StepFiles):
    """Saves the batch of every step.

    Args:
        workers: from which remote columns are fetched.
        source: whose state says where the next prompts come from.
    """

    def __init__(self, rollouts: SavedRollouts, workers: Any, source: Any) -> None:
        super().__init__(rollouts.directory, FILES)
        self._rollouts, self._workers, self._source = rollouts, workers, source

    def after_rewards(self, step: Step) -> None:
        with marked_timer("save_rollouts", step.timing):
            state, _ = self._source.state()
            metrics = {name: value for name, value in step.sampling.items() if not name.startswith(_MEASURED)}
            rows = rows_to_save(self._workers, step.batch)
            self._rollouts.write(step.number, SavedRollout(rows, metrics, state["loader"]))


def rows_to_save(workers: Any, batch: DataProto) -> DataProto:
    """The columns of ``batch`` that are saved, with its rows in the order in which they were generated."""
    texts = [name for name in _ROW_COLUMNS if name in batch.non_tensor_batch]
    rows = batch.select(batch_keys=_CONTROLLER_TENSORS, non_tensor_batch_keys=texts)
    truths = [{"ground_truth": str(of["ground_truth"])} for of in batch.non_tensor_batch["reward_model"]]
    rows.non_tensor_batch["reward_model"] = as_rows(truths)
    generated = batch.batch
    if batch.row_refs is not None:
        remote = tuple(name for name in GENERATED_COLUMNS if name in batch.row_refs)
        generated = workers.fetch_columns(worker_batch(batch), remote).batch
    for name in GENERATED_COLUMNS:
        if name in generated:
            rows.batch[name] = generated[name].to(STORED_DTYPES.get(name, generated[name].dtype))
    rows.reorder(np.argsort(batch.batch[GENERATED_ROW].numpy()))
    return DataProto(rows.batch, rows.non_tensor_batch)
