"""Training from records: every step's samples were generated and scored by an earlier run."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.metric_utils import marked_timer
from verl.trainer.ppo.rollout_records import RolloutRecords, controller_columns, generated_columns
from verl.utils.dataset import ResumableLoader


class RecordedSource:
    """Samples as the records of ``trainer.train_only`` have them, by the number of the step.

    The workers take the rows as if they had generated them, so that all that follows is as in the recorded run.

    Args:
        loader: is moved as that run's was, so that a checkpoint can be gone on from with a rollout engine.
    """

    def __init__(
        self, config: PPOTrainerConfig, loader: ResumableLoader, records: RolloutRecords, workers: Any
    ) -> None:
        self.config, self.loader, self.records, self.workers = config, loader, records, workers

    @property
    def epoch(self) -> int:
        """Of the prompts that come next."""
        return self.loader.epoch

    def next_batch(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """The recorded samples of ``step``, with their scores, and the metrics that came with them."""
        with marked_timer("gen", timing):
            record = self.records.read(step)
            wanted = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
            if len(record.rows) != wanted:
                raise ValueError(
                    f"the record of step {step} has {len(record.rows)} samples, and data.train_batch_size x rollout.n "
                    f"is {wanted}: train with the settings of the run that was recorded"
                )
            rows, num_pad = pad_dataproto_to_divisor(generated_columns(record.rows), self.config.trainer.world_size)
            taken = unpad_dataproto(self.workers.take_rows(rows), num_pad)
            self.loader.load_state_dict(record.loader)
        return taken.union(controller_columns(record.rows)), record.metrics

    def generate(self, step: int, prompts: DataProto) -> DataProto:
        """There is no engine; nothing is validated."""
        raise AssertionError("trainer.train_only: a run without a rollout engine was asked to generate")

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a checkpoint needs to go on with the next prompts."""
        return {"loader": self.loader.state_dict()}, {}

    def load_state(self, state: dict[str, Any], arrays: dict[str, np.ndarray], step: int) -> None:
        """Goes on with the record after ``step``."""
        self.loader.load_state_dict(state["loader"])
