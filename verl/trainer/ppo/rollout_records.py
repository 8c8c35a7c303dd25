"""Whole generated and scored batches on disk: what a step trains on, to be trained on again without a rollout engine.

A file is ``rollouts/step_N.safetensors``, whole or not there: every tensor of the batch, B rows in the order in which
they were generated, and as JSON in its metadata the other columns and what the step's source said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.trainer.ppo.checkpointing import write_bytes
from verl.trainer.ppo.scores import REWARD_PARTS
from verl.trainer.ppo.step_files import remove_steps, steps_of
from verl.workers.row_store import GENERATED_COLUMNS, STORED_DTYPES, worker_batch

FOLDER, FILES = "rollouts", "step_*.safetensors"
_COLUMNS = ("uid", "data_source", "prompt_text", "finish_reason", REWARD_PARTS)
_OF_CONTROLLER = ("responses", "num_tokens", "token_level_scores")
_DESCRIPTION = "rollouts"  # key of the metadata


@dataclass(frozen=True)
class RolloutRecord:
    """One step's batch.

    Attributes:
        rows: ``responses``, ``token_level_scores`` [B, R], ``num_tokens`` [B], and what workers keep of generated rows,
            in the types in which they keep it.
        metrics: of how the samples came about.
        loader: where the next step's prompts come from.
    """

    rows: DataProto
    metrics: dict[str, float]
    loader: dict[str, int]


class RolloutRecords:
    """The records in a folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def cut_back(self, first_step: int) -> None:
        """Removes the files of ``first_step`` and later: those steps will be run again."""
        remove_steps(self._directory, FILES, first_step)

    def write(self, step: int, record: RolloutRecord) -> None:
        """The file of ``step``; on disk when this returns."""
        columns = {name: values.tolist() for name, values in record.rows.non_tensor_batch.items()}
        described = {"columns": columns, "metrics": record.metrics, "loader": record.loader}
        tensors = {name: tensor.contiguous() for name, tensor in record.rows.batch.items()}
        self._directory.mkdir(parents=True, exist_ok=True)
        content = safetensors.torch.save(tensors, {_DESCRIPTION: json.dumps(described)})
        write_bytes(self._path(step), content)

    def read(self, step: int) -> RolloutRecord:
        """The record of ``step``; ValueError when there is none, or it is damaged."""
        path = self._path(step)
        if not path.is_file():
            found = steps_of(self._directory, FILES)
            there = f"steps {found[0]} to {found[-1]}" if found else "none"
            raise ValueError(f"there is no record of step {step}: {path}; {self._directory} has records of {there}")
        try:
            with safe_open(str(path), framework="pt") as opened:
                described = json.loads((opened.metadata() or {})[_DESCRIPTION])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged, or no record of a rollout: {error}") from error
        columns = {name: as_rows(values) for name, values in described["columns"].items()}
        return RolloutRecord(DataProto.from_dict(tensors, columns), described["metrics"], described["loader"])

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}.safetensors"


def recorded_rows(workers: Any, batch: DataProto, dealt_order: list[int]) -> DataProto:
    """What is recorded of ``batch``, whose row i was generated as row ``dealt_order[i]``; in generation's order."""
    rows = batch.select(batch_keys=list(_OF_CONTROLLER), non_tensor_batch_keys=_present(batch))
    truths = [{"ground_truth": str(of["ground_truth"])} for of in batch.non_tensor_batch["reward_model"]]
    rows.non_tensor_batch["reward_model"] = as_rows(truths)
    generated = batch.batch
    if batch.row_refs is not None:
        remote = tuple(name for name in GENERATED_COLUMNS if name in batch.row_refs)
        generated = workers.fetch_columns(worker_batch(batch), remote).batch
    for name in GENERATED_COLUMNS:
        if name in generated:
            rows.batch[name] = generated[name].to(STORED_DTYPES.get(name, generated[name].dtype))
    rows.reorder(np.argsort(dealt_order))
    return DataProto(rows.batch, rows.non_tensor_batch)


def _present(batch: DataProto) -> list[str]:
    return [name for name in _COLUMNS if name in batch.non_tensor_batch]


def generated_columns(rows: DataProto) -> DataProto:
    """The columns that workers keep, and those that their answer has with them."""
    names = [name for name in ("responses", *GENERATED_COLUMNS) if name in rows.batch]
    return rows.select(batch_keys=names, non_tensor_batch_keys=[])


def controller_columns(rows: DataProto) -> DataProto:
    """The columns that the controller had beside those."""
    tensors: dict[str, torch.Tensor] = {name: rows.batch[name] for name in ("num_tokens", "token_level_scores")}
    return DataProto.from_dict(tensors, rows.non_tensor_batch)
