"""The samples that a rollout replica generates beside training: they start and finish one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from verl.protocol import DataProto
from verl.utils.dataset.prompt_items import ENVIRONMENT_ROW
from verl.utils.timeline import now_s
from verl.workers.rollout.rollout_messages import (
    ENVIRONMENT_SEED,
    PROMPT,
    SAMPLE,
    VERSIONS,
    RolloutRequest,
    RolloutResult,
    UnfinishedSample,
)
from verl.workers.rollout.trajectory import Trajectory
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.row_store import RowStore
from vllm.v1.engine.llm_engine import StepLimits
from vllm.v1.request import Request


class SampleStream:
    """The unfinished samples of one replica, in its engine or, while weights change, withdrawn from it.

    Withdrawn samples are always queued again in the order of (prompt, sample), so that a run that resumes from
    ``state`` computes the same as the run that continues.
    """

    def __init__(self, rollout: vLLMRollout) -> None:
        self._rollout = rollout
        self._engine = rollout.inference_engine.engine
        self._turns = rollout.new_turns()
        self._withdrawn: list[Request] = []

    def start(self, prompts: DataProto) -> None:
        if not len(prompts):
            return
        columns = prompts.non_tensor_batch
        names = ("raw_prompt_ids", "sampling_seeds", "response_limit", PROMPT, SAMPLE)
        if self._turns is not None:
            rows = zip(*(columns[name] for name in (*names, ENVIRONMENT_ROW, ENVIRONMENT_SEED)), strict=True)
            for ids, seed, limit, prompt, sample, row, row_seed in rows:
                name = _request_id(prompt, sample)
                self._turns.begin(
                    self._rollout.trajectory(name, ids, int(seed), int(limit), row, int(row_seed), int(prompt))
                )
            return
        self._engine.add_requests(
            [
                self._rollout.request(
                    _request_id(prompt, sample), ids, int(seed), int(limit), prompts.meta_info, priority=int(prompt)
                )
                for ids, seed, limit, prompt, sample in zip(*(columns[name] for name in names), strict=True)
            ]
        )

    def run(self, max_steps: int, meta_info: dict[str, Any]) -> list[Request | Trajectory]:
        """Runs up to ``max_steps`` engine steps and returns the finished samples in the order of (prompt, sample).

        Replicas that share experts run the same number of steps together.
        """
        withdrawn, self._withdrawn = self._withdrawn, []
        self._engine.add_requests(withdrawn)
        if self._turns is not None:
            self._turns.meta_info = meta_info
        finished: Sequence[Request | Trajectory] = self._engine.run(StepLimits(max_steps), source=self._turns)
        if self._turns is not None:
            finished = self._turns.take_ended()
        return sorted(finished, key=_key)

    def rows(self, finished: list[Request | Trajectory], meta_info: dict[str, Any]) -> DataProto:
        """The columns of finished samples that training reads, with their numbers and the versions of their tokens."""
        keys = [_key(sample) for sample in finished]
        batch = self._rollout.to_batch(finished, meta_info)
        columns: dict[str, list[Any]] = {
            PROMPT: [prompt for prompt, _ in keys],
            SAMPLE: [sample for _, sample in keys],
            VERSIONS: [_run_lengths(sample.policy_versions()) for sample in finished],
        }
        return batch.union(DataProto.from_dict(non_tensors=columns))

    def num_tokens(self, finished: Sequence[Request | Trajectory]) -> dict[tuple[int, int], int]:
        """(prompt, sample) -> tokens behind the prompt by now, of these and of the unfinished samples in the engine."""
        between_turns = self._turns.unfinished if self._turns is not None else []
        counts = {_key(sample): sample.num_output_tokens for sample in [*finished, *between_turns]}
        for request in self._engine.core.scheduler.unfinished:
            counts[_key(request)] = counts.get(_key(request), 0) + request.num_output_tokens
        return counts

    def withdraw(self, keeps_cache: bool = False) -> None:
        """Takes all samples out of the engine, so that it can get new weights; ``run`` puts them back.

        With ``keeps_cache`` they keep the cache that the old weights computed, otherwise it is computed again.
        """
        if not keeps_cache:
            self._engine.free_cache(self._withdrawn)
        unfinished = [*self._withdrawn, *self._engine.withdraw(keeps_cache)]
        self._withdrawn = sorted(unfinished, key=_key)

    def abort(self) -> None:
        """Drops all unfinished samples."""
        self.withdraw()
        self._withdrawn = []
        if self._turns is not None:
            self._turns.abandon()

    def state(self) -> list[UnfinishedSample]:
        """Withdraws all unfinished samples and returns copies of them."""
        self.withdraw()
        if self._turns is not None:
            return list(self._turns.state(self._withdrawn))
        return list(copy.deepcopy(self._withdrawn))

    def restore(self, state: Sequence[UnfinishedSample]) -> None:
        """Takes over samples that ``state`` of any replica returned."""
        for one in state:
            request: Request | None
            if isinstance(one, Request):
                request = one
            else:
                assert self._turns is not None, one["request_id"]
                request = self._turns.begin(Trajectory.from_state(one))
            if request is not None:
                request.home = None
                self._withdrawn.append(request)
        self.withdraw()


def run_request(stream: SampleStream, request: RolloutRequest, store: RowStore, replica_size: int) -> RolloutResult:
    """Starts the request's samples, runs its engine steps, and stores and returns the finished samples."""
    start_s = now_s()
    store.drop(request.first_needed_batch)
    stream.start(request.prompts)
    finished = stream.run(request.max_steps, request.prompts.meta_info)
    rows = DataProto()
    if finished:
        generated = stream.rows(finished, request.prompts.meta_info)
        rows = store.store_generated(generated, replica_size, keeps_earlier=True)
    return RolloutResult(rows, now_s() - start_s, stream.num_tokens(finished))


def _request_id(prompt: int, sample: int) -> str:
    return f"{prompt}.{sample}"


def _key(sample: Request | Trajectory) -> tuple[int, int]:
    prompt, number, *_ = sample.request_id.split(".")  # and the turn
    return int(prompt), int(number)


def _run_lengths(versions: list[int]) -> list[list[int]]:
    return [[version, len(list(tokens))] for version, tokens in groupby(versions)]
