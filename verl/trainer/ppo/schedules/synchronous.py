"""The synchronous schedule: a step generates what it trains on, on the same devices."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.schedule import AsyncTrainingConfig
from verl.trainer.ppo.filter_groups import collect_groups, too_few_groups
from verl.trainer.ppo.metric_utils import add_generation_times, marked_timer
from verl.trainer.ppo.schedules.end_order import EndOrder
from verl.trainer.ppo.schedules.generation import Tokens, generate, prompt_rows, sampling_seeds, validation_meta
from verl.trainer.ppo.schedules.group_sampling import Grading, GroupBuffer, StepLedger
from verl.trainer.ppo.schedules.rollout_driver import RolloutDriver
from verl.utils.dataset import ResumableLoader
from verl.workers.rollout.rollout_messages import PROMPT, SAMPLE, VERSIONS

logger = logging.getLogger(__name__)


class SynchronousSource:
    """Every sample comes from the weights that it trains.

    Args:
        workers: all ranks; they sync weights when they generate.
        grading: of groups, for dynamic sampling.
    """

    def __init__(
        self, config: PPOTrainerConfig, loader: ResumableLoader, tokens: Tokens, workers: Any, grading: Grading | None
    ) -> None:
        self.config, self.loader, self.tokens, self.workers, self.grading = config, loader, tokens, workers, grading
        self._batches: Iterator[dict[str, Any]] = iter(loader)
        self._generation_s: dict[int, float] = {}  # first rank of a replica -> its seconds in this step

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    def next_batch(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """Samples for ``step`` and metrics of how they came about; with dynamic sampling they are scored."""
        self._generation_s = {}
        batch, metrics = self._collect(step, timing)
        if self._generation_s:
            metrics |= add_generation_times(self._generation_s, timing)
        return batch, metrics

    def _collect(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        grading, filters = self.grading, self.config.algorithm.filter_groups
        if grading is None:
            return self._sample(step, 0, timing), {}
        if filters.stop_early:
            return self._first_groups(step, timing)

        def scored(generation: int) -> DataProto:
            batch = self._sample(step, generation, timing)
            with marked_timer("reward", timing):
                grading.score(batch)
            return batch

        batch_size = self.config.data.train_batch_size
        return collect_groups(scored, grading.keeps, batch_size, filters.max_num_gen_batches)

    def _first_groups(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """The first groups by ``EndOrder`` that are kept; the rest is aborted. More prompts follow when too many are
        rejected. The whole step has one weight sync.
        """
        config, grading = self.config, self.grading
        assert grading is not None
        engine, limit = config.actor_rollout_ref.rollout, config.algorithm.filter_groups.max_num_gen_batches
        ledger, submitted = StepLedger(config.data.train_batch_size), list[DataProto]()

        def rows_of(number: int) -> DataProto:
            generation, index = divmod(number, config.gen_batch_size)
            rows = submitted[generation].select_idxs(np.arange(index * engine.n, (index + 1) * engine.n))
            rows.non_tensor_batch[PROMPT] = as_rows([number] * engine.n)
            rows.non_tensor_batch[SAMPLE] = as_rows(list(range(engine.n)))
            return rows

        replicas, max_num_seqs = config.rollout_replicas, engine.max_num_seqs
        order = EndOrder(replicas * max_num_seqs, engine.n)
        buffer = GroupBuffer(ledger, rows_of, replicas, max_num_seqs, grading, drops_unfinished=True, order=order)
        pace = AsyncTrainingConfig(fixed_order=True)
        driver = RolloutDriver(pace, self.workers, buffer, self.tokens, engine.tensor_model_parallel_size, 0)
        with marked_timer("gen", timing):
            timing["update_weights"] = max(self.workers.begin_generation())
            while (chosen := buffer.choice()) is None:
                if buffer.lacks_prompts:
                    if limit and len(submitted) == limit:
                        counts = buffer.counts
                        raise ValueError(
                            too_few_groups(counts.num_kept, ledger.prompts_per_step, counts.num_graded, limit)
                        )
                    submitted.append(self.next_prompts(step, len(submitted)))
                    ledger.num_submitted += config.gen_batch_size
                    order.submit(config.gen_batch_size)
                driver.step()
            batch = buffer.take(chosen)
            batch.pop(non_tensor_batch_keys=[PROMPT, SAMPLE, VERSIONS])  # a version here is the count of a process
            self.workers.end_generation()
            self._generation_s = driver.take_seconds()
        counts = buffer.take_counts()
        counts.num_aborted = ledger.num_submitted - counts.num_graded
        return batch, counts.metrics() | {"train/num_gen_batches": float(len(submitted))}

    def generate(self, step: int, prompts: DataProto, is_greedy: bool = False) -> DataProto:
        return generate(
            self.workers, prompts, self.tokens, self.config.rollout_replicas, {}, **validation_meta(is_greedy)
        )[0]

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The state that a checkpoint needs to continue with the next prompts, as JSON and as arrays."""
        return {"loader": self.loader.state_dict()}, {}

    def load_state(self, state: dict[str, Any], arrays: dict[str, np.ndarray], step: int) -> None:
        self.loader.load_state_dict(state["loader"])
        if arrays:
            logger.warning("step %d: the samples that an asynchronous run had in flight are dropped", step)

    def _sample(self, step: int, generation: int, timing: dict[str, float]) -> DataProto:
        """The next prompts and their responses; a later generation of a step keeps the rows of the earlier ones."""
        prompts = self.next_prompts(step, generation)
        with marked_timer("gen", timing):
            replicas = self.config.rollout_replicas
            output, seconds = generate(self.workers, prompts, self.tokens, replicas, timing, keeps_rows=generation > 0)
            for rank, generation_s in seconds.items():
                self._generation_s[rank] = self._generation_s.get(rank, 0.0) + generation_s
            return prompts.union(output)

    def next_prompts(self, step: int, generation: int) -> DataProto:
        """The next prompts, each repeated n times; uids per prompt and sampling seeds per row differ within a step."""
        prompts = next(self._batches)
        rollout, count = self.config.actor_rollout_ref.rollout, self.config.gen_batch_size
        first = generation * count
        seeds = sampling_seeds(rollout.seed, step, first * rollout.n, count * rollout.n)
        return prompt_rows(prompts, [f"{step}-{first + i}" for i in range(count)], rollout.n, seeds)
