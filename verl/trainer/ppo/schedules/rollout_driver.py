"""The driver of rollout ranks: calls of a few engine steps each, one at a time; and what a checkpoint holds of them.

A checkpoint has the prompts in flight with all of their tokens, as JSON and as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.trainer.config.schedule import AsyncTrainingConfig
from verl.trainer.ppo.schedules.generation import Tokens
from verl.trainer.ppo.schedules.sample_buffer import SampleBuffer, gather_rows
from verl.trainer.ppo.schedules.staleness import StalenessLedger
from verl.workers.config import RolloutConfig
from verl.workers.rollout.rollout_messages import (
    DRAFTS,
    PROMPT,
    PROMPT_LENGTH,
    SAMPLE,
    TURNS,
    VERSIONS,
    RolloutRequest,
    RolloutResult,
    UnfinishedSample,
    prompt_of,
)
from verl.workers.row_store import worker_batch
from vllm.v1.engine import request_codec

_VERSION = 4
# Columns of a finished sample that are JSON; the last ones with several turns.
_DESCRIBED = (PROMPT, SAMPLE, VERSIONS, "finish_reason", TURNS, PROMPT_LENGTH, DRAFTS)
_COLUMN = "column:"  # before the name of a column in the arrays


@dataclass(eq=False)
class RolloutDriver:
    """Keeps the rollout ranks running: before each call prompts are started, after it finished samples are buffered.

    Attributes:
        rollout: the group of ranks that generate.
        replica_size: ranks of a replica, which get the same request and give the same result.
        first_rank: the first of these ranks in the world.
    """

    config: AsyncTrainingConfig
    rollout: Any
    buffer: SampleBuffer
    tokens: Tokens
    replica_size: int
    first_rank: int
    _call: Any = None
    _seconds: dict[int, float] = field(default_factory=dict)

    def poll(self) -> None:
        """Takes the result of a call that is over and starts the next one; never waits.

        With ``fixed_order`` a call is only started while the next step's samples are not here. Then the calls, and all
        that depends on them, follow from counts alone and not from how long anything takes.
        """
        if self._call is not None and self._call.is_done() and self.buffer.is_settled:
            self._collect()
        if self._call is None and not (self.config.fixed_order and self.buffer.is_next_step_ready):
            self._start_call()
            if self._call is None and self.buffer.is_settled:
                self.buffer.settle()

    def step(self, *, starts_prompts: bool = True) -> None:
        """Waits for the call that is under way, or for a new one; for grades, where nothing is left to generate."""
        if self._call is None:
            self._start_call(starts_prompts)
        if self._call is not None:
            self._collect()
        else:
            assert self.buffer.settle(), "a step waits for samples, and none may be started"

    def finish(self) -> None:
        """Waits until no call is under way and everything that must be generated before a weight sync has been."""
        if self._call is not None:
            self._collect()
        waits_for_step = self.config.fixed_order or self.buffer.drops_unfinished
        while waits_for_step and not self.buffer.is_next_step_ready and self.buffer.can_go_on:
            self.step()
        if self.buffer.drops_unfinished:
            if self.buffer.drop_unneeded():
                self.rollout.abort_unfinished()
            return
        while not self.config.partial_rollout and self.buffer.has_unfinished:
            self.step(starts_prompts=False)

    def take_seconds(self) -> dict[int, float]:
        """First rank of each replica -> seconds of its calls since the last time that this was called."""
        taken, self._seconds = self._seconds, {}
        return taken

    def per_rank(self, values: list[Any]) -> list[Any]:
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
        self.buffer.settle()
        for replica, result in enumerate(results):
            rank = self.first_rank + replica * self.replica_size
            self._seconds[rank] = self._seconds.get(rank, 0.0) + result.seconds
            self.buffer.note(result.num_tokens)
            self.buffer.add(replica, result.rows)


def save_buffer(
    driver: RolloutDriver, ledger: StalenessLedger, rollout: RolloutConfig
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the state of the driver's buffer with its ledger and of the engines; no call may be under way.

    The unfinished samples then start with an empty cache, as they do in a run that resumes from the checkpoint.
    """
    buffer = driver.buffer
    buffer.settle()
    unfinished: list[list[UnfinishedSample]] = driver.rollout.release_unfinished()[:: driver.replica_size]
    arrays = {"unfinished": request_codec.encode([sample for of_replica in unfinished for sample in of_replica])}
    state: dict[str, Any] = {
        "version": _VERSION,
        "sizes": _sizes(rollout),
        "ledger": ledger.state(),
        "buffer": buffer.state(),
        "replicas": [[number, prompt.replica] for number, prompt in buffer.prompts.items()],
        "finished": [],
    }
    finished = [sample for _, prompt in sorted(buffer.prompts.items()) for _, sample in sorted(prompt.finished.items())]
    if finished:
        rows = gather_rows(finished)
        state["described"] = [name for name in _DESCRIBED if name in rows.non_tensor_batch]
        described = [rows.non_tensor_batch[name].tolist() for name in state["described"]]
        state["finished"] = list(zip(*described, strict=True))
        assert rows.row_refs is not None
        fetched = driver.rollout.fetch_columns(worker_batch(rows), tuple(rows.row_refs.columns))
        arrays |= {_COLUMN + name: fetched.batch[name].numpy() for name in rows.row_refs.columns}
    return state, arrays


def load_buffer(
    driver: RolloutDriver,
    ledger: StalenessLedger,
    rollout: RolloutConfig,
    state: dict[str, Any],
    arrays: dict[str, np.ndarray],
) -> None:
    """Restores what ``save_buffer`` returned, also with another number of replicas."""
    if state.get("version") != _VERSION:
        raise ValueError(
            "the samples in flight of this checkpoint were saved by an earlier version of this code: resume with that "
            "version, or with trainer.schedule=sync, which drops them"
        )
    for key, ours in _sizes(rollout).items():
        if state["sizes"][key] != ours:
            raise ValueError(
                f"actor_rollout_ref.rollout.{key} is {ours} and was {state['sizes'][key]} when the checkpoint's "
                "samples were started; resume with the same"
            )
    buffer = driver.buffer
    ledger.load_state(state["ledger"])
    for number, replica in state["replicas"]:
        buffer.restart(number, replica % buffer.num_replicas)
    replicas = range(buffer.num_replicas)
    unfinished: list[list[UnfinishedSample]] = [[] for _ in replicas]
    for sample in request_codec.decode(arrays["unfinished"]):
        unfinished[buffer.prompts[prompt_of(sample)].replica].append(sample)
    names = state.get("described", _DESCRIBED[:4])
    rows = _finished_rows(names, state["finished"], arrays, rollout.prompt_length)
    replica_of = np.array([buffer.prompts[number].replica for number, *_ in state["finished"]], dtype=np.int64)
    parts = [rows.select_idxs(np.flatnonzero(replica_of == replica)) if len(rows) else rows for replica in replicas]
    stored = driver.rollout.restore_samples(driver.per_rank(unfinished), driver.per_rank(parts))
    for replica, stored_rows in enumerate(stored[:: driver.replica_size]):
        buffer.add(replica, stored_rows)
    buffer.load_state(state.get("buffer", {}))


def _sizes(rollout: RolloutConfig) -> dict[str, int]:
    """The sizes that must be the same for samples in flight to be continued."""
    return {"n": rollout.n, "prompt_length": rollout.prompt_length, "response_length": rollout.response_length}


def _finished_rows(
    names: Sequence[str], described: list[list[Any]], arrays: dict[str, np.ndarray], prompt_length: int
) -> DataProto:
    """The rows of finished samples in the form in which a replica's engine returned them."""
    columns = {
        name.removeprefix(_COLUMN): torch.from_numpy(values)
        for name, values in arrays.items()
        if name.startswith(_COLUMN)
    }
    if not columns:
        return DataProto()
    columns["responses"] = columns["input_ids"][:, prompt_length:]
    texts = dict(zip(names, zip(*described, strict=True), strict=True))
    return DataProto.from_dict(columns, {name: list(values) for name, values in texts.items()})
