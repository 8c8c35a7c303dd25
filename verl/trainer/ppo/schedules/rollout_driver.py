"""The driver of rollout ranks: calls of a few engine steps each, one at a time."""

from __future__ import annotations

from typing import Any

from verl.protocol import DataProto
from verl.trainer.config.schedule import AsyncTrainingConfig
from verl.trainer.ppo.schedules.generation import Tokens
from verl.trainer.ppo.schedules.sample_buffer import SampleBuffer
from verl.workers.rollout.rollout_messages import RolloutRequest, RolloutResult


class RolloutDriver:
    """Keeps the rollout ranks running: before each call prompts are started, after it finished samples are buffered.

    Args:
        rollout: the group of ranks that generate.
        replica_size: ranks of a replica, which get the same request and give the same result.
        first_rank: the first of these ranks in the world.
    """

    def __init__(
        self,
        config: AsyncTrainingConfig,
        rollout: Any,
        buffer: SampleBuffer,
        tokens: Tokens,
        *,
        replica_size: int,
        first_rank: int,
    ) -> None:
        self.config, self.rollout, self.buffer, self.tokens = config, rollout, buffer, tokens
        self.replica_size, self.first_rank = replica_size, first_rank
        self._call: Any = None
        self._seconds: dict[int, float] = {}

    def poll(self) -> None:
        """Takes the result of a call that is over and starts the next one; never waits.

        With ``fixed_order`` a call is only started while the next step's samples are not here. Then the calls, and all
        that depends on them, follow from counts alone and not from how long anything takes.
        """
        if self._call is not None and self._call.is_done():
            self._collect()
        if self._call is None and not (self.config.fixed_order and self.buffer.is_next_step_ready):
            self._start_call()

    def step(self, *, starts_prompts: bool = True) -> None:
        """Waits for the call that is under way, or for a new one."""
        if self._call is None:
            self._start_call(starts_prompts)
        assert self._call is not None, "a step waits for samples, and none may be started"
        self._collect()

    def finish(self) -> None:
        """Waits until no call is under way and everything that must be generated before a weight sync has been."""
        if self._call is not None:
            self._collect()
        while self.config.fixed_order and not self.buffer.is_next_step_ready:
            self.step()
        while not self.config.partial_rollout and self.buffer.has_unfinished:
            self.step(starts_prompts=False)

    def take_seconds(self) -> dict[int, float]:
        """First rank of each replica -> seconds of its calls since the last time that this was called."""
        taken, self._seconds = self._seconds, {}
        return taken

    def per_rank(self, values: list[Any]) -> list[Any]:
        """The value of each replica for each of its ranks."""
        return [value for value in values for _ in range(self.replica_size)]

    def _start_call(self, starts_prompts: bool = True) -> None:
        """Starts a call, unless nothing is left to generate."""
        num_replicas = self.buffer.num_replicas
        new = self.buffer.start_prompts() if starts_prompts else [DataProto() for _ in range(num_replicas)]
        if not self.buffer.has_unfinished:
            return
        requests = []
        for replica, prompts in enumerate(new):
            prompts.meta_info |= self.tokens.meta_info()
            needed = self.buffer.first_needed_batch(replica)
            requests.append(RolloutRequest(prompts, self.config.steps_per_call, needed))
        self._call = self.rollout.start("run_steps", self.per_rank(requests))

    def _collect(self) -> None:
        call, self._call = self._call, None
        results: list[RolloutResult] = call.get()[:: self.replica_size]
        for replica, result in enumerate(results):
            rank = self.first_rank + replica * self.replica_size
            self._seconds[rank] = self._seconds.get(rank, 0.0) + result.seconds
            self.buffer.add(replica, result.rows)
