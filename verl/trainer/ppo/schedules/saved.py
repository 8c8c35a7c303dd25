"""Training on saved rollouts: an earlier run generated and scored the samples of every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.metric_utils import marked_timer
from verl.trainer.ppo.saved_rollouts import SavedRollouts
from verl.utils.dataset import ResumableLoader
from verl.workers.row_store import GENERATED_COLUMNS


@dataclass(frozen=True)
class SavedSource:
    """The samples of ``trainer.train_only``, by the number of the step.

    The workers take the rows as if they had generated them, so the rest of the step is that of the earlier run.

    Attributes:
        loader: follows that of the earlier run, so that a checkpoint can be resumed with a rollout engine.
    """

    config: PPOTrainerConfig
    loader: ResumableLoader
    rollouts: SavedRollouts
    workers: Any

    @property
    def epoch(self) -> int:
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
            names = [name for name in ("responses", *GENERATED_COLUMNS) if name in saved.rows.batch]
            generated = saved.rows.select(batch_keys=names, non_tensor_batch_keys=[])
            rows, num_pad = pad_dataproto_to_divisor(generated, self.config.trainer.world_size)
            taken = unpad_dataproto(self.workers.take_rows(rows), num_pad)
            self.loader.load_state_dict(saved.loader)
        others = saved.rows.select(batch_keys=("num_tokens", "token_level_scores"))
        return taken.union(others), saved.metrics

    def generate(self, step: int, prompts: DataProto, is_greedy: bool = False) -> DataProto:
        """There is no rollout engine, and nothing is validated."""
        raise AssertionError("trainer.train_only: a run without a rollout engine was asked to generate")

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {"loader": self.loader.state_dict()}, {}

    def load_state(self, state: dict[str, Any], arrays: dict[str, np.ndarray], step: int) -> None:
        self.loader.load_state_dict(state["loader"])
