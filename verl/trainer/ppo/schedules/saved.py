"""Training on saved rollouts: an earlier run generated and scored the samples of every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.metric_utils import marked_timer
from verl.trainer.ppo.saved_rollouts import SavedRollouts, controller_columns, generated_columns
from verl.utils.dataset import ResumableLoader


class SavedSource:
    """The samples of ``trainer.train_only``, by the number of the step.

    The workers take the rows as if they had generated them, so the rest of the step is that of the earlier run.

    Args:
        loader: follows that of the earlier run, so that a checkpoint can be resumed with a rollout engine.
    """

    def __init__(
        self, config: PPOTrainerConfig, loader: ResumableLoader, rollouts: SavedRollouts, workers: Any
    ) -> None:
        self.config, self.loader, self.rollouts, self.workers = config, loader, rollouts, workers

    @property
    def epoch(self) -> int:
        """The epoch of the next prompts."""
        return self.loader.epoch

    def next_batch(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """The saved samples of ``step`` with their scores, and the metrics that were saved with them."""
        with marked_timer("gen", timing):
            saved = self.rollouts.read(step)
            expected = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
            if len(saved.rows) != expected:
                raise ValueError(
                    f"the record of step {step} has {len(saved.rows)} samples, and data.train_batch_size x rollout.n "
                    f"is {expected}: train with the settings of the run that saved it"
                )
            rows, num_pad = pad_dataproto_to_divisor(generated_columns(saved.rows), self.config.trainer.world_size)
            taken = unpad_dataproto(self.workers.take_rows(rows), num_pad)
            self.loader.load_state_dict(saved.loader)
        return taken.union(controller_columns(saved.rows)), saved.metrics

    def generate(self, step: int, prompts: DataProto) -> DataProto:
        """There is no rollout engine, and nothing is validated."""
        raise AssertionError("trainer.train_only: a run without a rollout engine was asked to generate")

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The state that a checkpoint needs to continue with the next prompts."""
        return {"loader": self.loader.state_dict()}, {}

    def load_state(self, state: dict[str, Any], arrays: dict[str, np.ndarray], step: int) -> None:
        """Continues with the rollout after ``step``."""
        self.loader.load_state_dict(state["loader"])
