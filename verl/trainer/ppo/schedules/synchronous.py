"""The synchronous schedule: a step generates what it trains on, on the same devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.filter_groups import collect_groups, group_filter
from verl.trainer.ppo.metric_utils import add_generation_times, marked_timer
from verl.trainer.ppo.schedules.generation import Tokens, generate, prompt_rows, sampling_seeds
from verl.utils.dataset import ResumableLoader

logger = logging.getLogger(__name__)


class SynchronousSource:
    """Every sample comes from the weights that it trains.

    Args:
        workers: all ranks; they sync weights when they generate.
        score: grades a batch at once; for dynamic sampling.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        loader: ResumableLoader,
        tokens: Tokens,
        workers: Any,
        score: Callable[[DataProto], None],
    ) -> None:
        self.config, self.loader, self.tokens, self.workers, self.score = config, loader, tokens, workers, score
        self.keeps_group = group_filter(config) if config.algorithm.filter_groups.enable else None
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
        if self.keeps_group is None:
            return self._sample(step, 0, timing), {}

        def scored(generation: int) -> DataProto:
            batch = self._sample(step, generation, timing)
            with marked_timer("reward", timing):
                self.score(batch)
            return batch

        limit = self.config.algorithm.filter_groups.max_num_gen_batches
        return collect_groups(scored, self.keeps_group, self.config.data.train_batch_size, limit)

    def generate(self, step: int, prompts: DataProto) -> DataProto:
        return generate(self.workers, prompts, self.tokens, self.config.rollout_replicas, {}, validate=True)[0]

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
