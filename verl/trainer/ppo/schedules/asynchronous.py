"""The source of schedules in which some ranks generate while the others train.

The parts are the sample buffer with its staleness ledger (``sample_buffer``, ``staleness``), the driver of the rollout
ranks and the buffer's checkpoint (``rollout_driver``). Weights are synced before a step that
begins a version, between two calls of the rollout ranks: unfinished samples continue under the new weights
(``partial_rollout``) or are waited for. While the controller waits for training ranks, ``poll`` keeps the rollout ranks
busy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.single_controller.base import get_together
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.metric_utils import add_generation_times, marked_timer
from verl.trainer.ppo.schedules.generation import Tokens, generate, prompt_rows, sampling_seeds, validation_meta
from verl.trainer.ppo.schedules.group_sampling import Grading, GroupBuffer
from verl.trainer.ppo.schedules.rollout_driver import RolloutDriver, load_buffer, save_buffer
from verl.trainer.ppo.schedules.sample_buffer import SampleBuffer
from verl.trainer.ppo.schedules.staleness import StalenessLedger
from verl.utils.dataset import ResumableLoader, collate_fn
from verl.workers.rollout.rollout_messages import PROMPT, SAMPLE, VERSIONS


class AsynchronousSource:
    """Samples of rollout ranks that run beside training.

    Args:
        training: the group of ranks that train, which are the first ranks of the world.
        rollout: the group of ranks that generate.
        grading: of groups as they end, for dynamic sampling.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        loader: ResumableLoader,
        tokens: Tokens,
        training: Any,
        rollout: Any,
        grading: Grading | None,
    ) -> None:
        self.config, self.loader, self.tokens = config, loader, tokens
        self.training, self.rollout = training, rollout
        self.steps_per_version = config.async_config.trigger_parameter_sync_step
        filters, batch = config.algorithm.filter_groups, config.data.train_batch_size
        surplus = config.gen_batch_size - batch if filters.stop_early else 0
        self.ledger = StalenessLedger(batch, self.steps_per_version, config.async_config.staleness_threshold, surplus)
        engine = config.actor_rollout_ref.rollout
        sizes = (self.ledger, self._rows_of, config.rollout_replicas, engine.max_num_seqs)
        self.buffer, self._groups = SampleBuffer(*sizes), None
        if grading is not None:
            limit = filters.max_num_gen_batches * config.gen_batch_size
            self.buffer = self._groups = GroupBuffer(
                *sizes, grading, drops_unfinished=filters.stop_early, max_groups=limit
            )
        self.driver = RolloutDriver(
            config.async_config,
            rollout,
            self.buffer,
            tokens,
            replica_size=engine.tensor_model_parallel_size,
            first_rank=config.trainer.world_size,
        )
        self._synced: int | None = None  # trained steps of the weights that the rollout ranks have

    @property
    def epoch(self) -> int:
        return self.loader.locate(self.ledger.next_prompt)[0]

    def next_batch(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """Samples for ``step`` and metrics of their age; the rollout ranks are running again when this returns."""
        self.training.while_waiting = None
        self.buffer.release()
        with marked_timer("gen", timing):
            version, index = divmod(step - 1, self.steps_per_version)
            if index == 0 or self._synced is None:
                self._sync(step - 1, timing)
            if index == 0:
                self.ledger.begin_version(version)
            while (chosen := self.buffer.choice()) is None:
                self.driver.step()
            batch = self.buffer.take(chosen)
        metrics = self._age_metrics(batch)
        if self._groups is not None:
            metrics |= self._groups.take_counts().metrics()
        if seconds := self.driver.take_seconds():
            metrics |= add_generation_times(seconds, timing)
        self.training.while_waiting = self.driver.poll
        self.driver.poll()
        return batch, metrics

    def generate(self, step: int, prompts: DataProto, is_greedy: bool = False) -> DataProto:
        self.training.while_waiting = None
        self._sync(step, {})
        return generate(self.rollout, prompts, self.tokens, self.buffer.num_replicas, {}, **validation_meta(is_greedy))[
            0
        ]

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The state for a checkpoint, as JSON and as arrays; nothing is generated from here to the next step."""
        self.training.while_waiting = None
        self._finish()
        state, arrays = save_buffer(self.driver, self.ledger, self.config.actor_rollout_ref.rollout)
        epoch, index = self.loader.locate(self.ledger.next_prompt)
        position = {"epoch": epoch, "batch_index": index // self.loader.batch_size}
        return {"loader": self.loader.state_dict() | position, "schedule": state}, arrays

    def load_state(self, state: dict[str, Any], arrays: dict[str, np.ndarray], step: int) -> None:
        """Continues where ``state`` was taken, after ``step``; also with another number of replicas."""
        self.loader.load_state_dict(state["loader"])
        if "schedule" in state:
            load_buffer(self.driver, self.ledger, self.config.actor_rollout_ref.rollout, state["schedule"], arrays)
            return
        # The checkpoint is that of a synchronous run.
        batches = self.loader.epoch * len(self.loader) + self.loader.batch_index
        self.ledger.next_prompt = batches * self.loader.batch_size
        self.ledger.begin_version(step // self.steps_per_version)

    def _sync(self, trained_steps: int, timing: dict[str, float]) -> None:
        """Sends the weights after ``trained_steps`` steps to the rollout ranks, unless they have them."""
        self._finish()
        if self._synced == trained_steps:
            return
        with marked_timer("update_weights", timing):
            get_together(*(group.start("update_weights", trained_steps) for group in (self.training, self.rollout)))
        self._synced = trained_steps

    def _finish(self) -> None:
        """Without weights nothing can have been started."""
        if self._synced is not None:
            self.driver.finish()

    def _rows_of(self, number: int) -> DataProto:
        """The rows of a prompt, which follow from its number and equal those of the synchronous schedule's steps."""
        rollout, per_step = self.config.actor_rollout_ref.rollout, self.config.data.train_batch_size
        step, index = divmod(number, per_step)
        seeds = sampling_seeds(rollout.seed, step + 1, index * rollout.n, rollout.n)
        prompts = collate_fn([self.loader.prompt(number)])
        rows = prompt_rows(prompts, [f"{step + 1}-{index}"], rollout.n, seeds)
        rows.non_tensor_batch[PROMPT] = as_rows([number] * rollout.n)
        rows.non_tensor_batch[SAMPLE] = as_rows(list(range(rollout.n)))
        return rows

    def _age_metrics(self, batch: DataProto) -> dict[str, float]:
        versions = batch.non_tensor_batch[VERSIONS]
        ages = np.array([self.ledger.version - spans[0][0] // self.steps_per_version for spans in versions])
        assert ages.max() <= self.ledger.max_staleness, f"{ages.max()} versions old, over {self.ledger.max_staleness}"
        num_finished = len(self.buffer.finished)
        return {
            "schedule/staleness/mean": float(ages.mean()),
            "schedule/staleness/max": float(ages.max()),
            "schedule/stale_samples": float((ages > 0).mean()),
            "schedule/partial_samples": float(np.mean([len(spans) > 1 for spans in versions])),
            "schedule/waiting_prompts": float(num_finished),
            "schedule/unfinished_prompts": float(len(self.buffer.prompts) - num_finished),
        }
