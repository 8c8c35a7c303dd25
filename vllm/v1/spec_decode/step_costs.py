"""Measures what steps cost, once for an engine: by steps of made-up sequences, before any block holds anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from vllm.utils import async_tensor_h2d
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.draft_length import StepCosts, interpolated
from vllm.v1.spec_decode.drafter import Speculation
from vllm.v1.worker.rank_context import RankContext
from vllm.v1.worker.worker import Worker

logger = logging.getLogger(__name__)

_CONTEXT = 512  # tokens of a made-up sequence, at most half of the longest
_ROUNDS = 6
_LINEAR = 1.8  # twice the sequences cost at least so much: more of them cost in proportion

SecondsOfStep = Callable[[Scheduler], float]
"""Runs the next step of a scheduler's requests and returns its seconds."""


def measure_step_costs(rank: RankContext, worker: Worker, run_step: SecondsOfStep) -> StepCosts:
    """The costs on the slowest of the ranks that step together; all of them call it, before the first step."""
    return _Measurement(rank, worker, run_step).costs()


class _SameDrafts:
    """So many drafts of token 0 for every request."""

    num_kinds, is_empty = 1, False

    def __init__(self, count: int) -> None:
        self._count = count

    def draft(self, requests: Sequence[Request], most: int) -> list[tuple[list[int], int]]:
        return [([0] * self._count, 0) for _ in requests]

    def keep(self, requests: Sequence[Request]) -> None:
        """There is nothing of theirs."""


class _Measurement:
    def __init__(self, rank: RankContext, worker: Worker, run_step: SecondsOfStep) -> None:
        config = rank.config
        assert config.speculative is not None
        self._scheduler, self._size, self._parallel = config.scheduler, config.cache.block_size, rank.parallel
        self._worker, self._run_step = worker, run_step
        self._device = rank.platform.exchange_device(rank.device)
        longest, self._most_drafts = config.model.max_model_len, config.speculative.num_speculative_tokens
        num_blocks = min(longest // 2, _CONTEXT) // self._size
        self._context = 1 + num_blocks * self._size  # its last token begins a block
        self._drafts = max(1, min(self._most_drafts, longest - self._context - 2))
        self._config = replace(
            config.speculative,
            method="ngram",
            num_speculative_tokens=self._drafts,
            disable_by_batch_size=None,
            adaptive=False,
        )
        own_blocks = (worker.cache.num_blocks - num_blocks) // (1 + -(-(self._drafts + 2) // self._size))
        self._most_sequences = max(1, min(config.scheduler.max_num_seqs, own_blocks))

    def costs(self) -> StepCosts:
        rows_of_sequence, config = 1 + self._drafts, self._scheduler
        most_rows = min(config.max_num_seqs * (1 + self._most_drafts), config.max_num_batched_tokens)
        ways = {"plain": (0, False), "verified": (self._drafts, False)}
        if self._worker.proposer is not None:
            ways["predicted"] = 0, True
        found = {name: self._doubling(*way) for name, way in ways.items()}
        for _ in range(_ROUNDS - 1):  # apart from each other: what disturbs one round is gone in another
            for name, way in ways.items():
                for count in found[name]:
                    found[name][count] = min(found[name][count], self._seconds(count, *way))
        plain, verified, both = found["plain"], found["verified"], found.get("predicted", {})
        drafts = {
            count * self._drafts: max(0.0, verified[count] - plain[count]) for count in verified.keys() & plain.keys()
        }
        columns = {
            "plain": plain,
            "verified": {count * rows_of_sequence: cost for count, cost in verified.items()} | {1: plain[1]},
            "drafted": drafts,
            "predicted": {rows: max(0.0, both[rows] - plain[rows]) for rows in both.keys() & plain.keys()} or {1: 0.0},
        }
        in_ms = ", ".join(
            f"{name} {{{', '.join(f'{rows}: {1e3 * cost:.2f}' for rows, cost in sorted(costs.items()))}}}"
            for name, costs in columns.items()
        )
        logger.info("milliseconds of a step by its rows: %s", in_ms)
        return StepCosts(*(interpolated(costs, most_rows) for costs in columns.values()))

    def _doubling(self, num_drafts: int, has_pass: bool) -> dict[int, float]:
        """Seconds by sequences, twice as many each time, until these cost in proportion."""
        found: dict[int, float] = {}
        count, is_linear = 1, 0
        most = min(self._most_sequences, self._scheduler.max_num_batched_tokens // (1 + num_drafts))
        while is_linear < 2 and count <= max(1, most):
            self._seconds(count, num_drafts, has_pass)  # prepares what later steps have
            found[count] = self._seconds(count, num_drafts, has_pass)
            if count // 2 in found:
                is_linear = is_linear + 1 if found[count] > _LINEAR * found[count // 2] else 0
            count *= 2
        return found

    def _seconds(self, num_sequences: int, num_drafts: int, has_pass: bool) -> float:
        """Seconds of a step on the slowest rank."""
        config = replace(self._config, method="mtp", num_speculative_tokens=1) if has_pass else self._config
        kv = KVCacheManager(self._worker.cache.num_blocks, self._size, enable_prefix_caching=False)
        scheduler = Scheduler(self._scheduler, kv, Speculation(config, _SameDrafts(num_drafts)))
        shared = kv.pool.allocate((self._context - 1) // self._size)
        for index in range(num_sequences):
            request = Request(str(index), [0] * self._context, max_tokens=self._drafts + 2, seed=index)
            request.num_computed_tokens, request.block_ids = self._context - 1, list(shared)
            request.status = RequestStatus.RUNNING
            kv.pool.share(shared)
            scheduler.running.append(request)
        requests, batch = list(scheduler.running), self._worker.batch
        batch.update(SchedulerOutput(requests, [1] * num_sequences, [None] * num_sequences, [], num_sequences))
        seconds = self._run_step(scheduler)
        batch.update(SchedulerOutput([], [], [], removed=requests, total_num_tokens=0))
        batch.has_gaps = False
        return self._agreed(seconds)

    def _agreed(self, seconds: float) -> float:
        mine = async_tensor_h2d(np.array([round(1e9 * seconds)], dtype=np.int64), self._device)
        everyone = self._parallel.tp.all_gather(mine)
        if self._parallel.config.steps_in_lockstep:
            everyone = self._parallel.dp.all_gather(everyone)
        return float(everyone.max()) * 1e-9
