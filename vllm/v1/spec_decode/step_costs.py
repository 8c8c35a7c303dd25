"""Measures what steps cost, once for an engine: by steps of made-up sequences that write to blocks of nobody."""

from __future__ import annotations

import logging
import time

import numpy as np

from vllm.utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.draft_length import StepCosts, interpolated
from vllm.v1.worker.rank_context import RankContext
from vllm.v1.worker.worker import Worker

logger = logging.getLogger(__name__)

_CONTEXT = 512  # tokens of a made-up sequence, at most half of the longest
_REPEATS = 3
_LINEAR = 1.8  # twice the rows cost at least so much: further rows cost in proportion


def measure_step_costs(rank: RankContext, worker: Worker) -> StepCosts:
    """The costs on the slowest of the ranks that step together; all of them call it, before the first step."""
    return _Measurement(rank, worker).costs()


class _Measurement:
    def __init__(self, rank: RankContext, worker: Worker) -> None:
        self._parallel, self._worker = rank.parallel, worker
        self._device = rank.platform.exchange_device(rank.device)
        config = rank.config
        assert config.speculative is not None
        longest = config.model.max_model_len
        self._context = max(1, min(longest // 2, _CONTEXT))
        self._most_drafts = max(1, min(config.speculative.num_speculative_tokens, longest - self._context))
        self._size = config.cache.block_size
        self._most_sequences = config.scheduler.max_num_seqs
        self._most_rows = min(self._most_sequences * (1 + self._most_drafts), config.scheduler.max_num_batched_tokens)

    def costs(self) -> StepCosts:
        plain = self._doubling(1, self._most_sequences, 0, 0)
        verified = self._doubling(1 + self._most_drafts, self._most_rows, self._most_drafts, 0)
        predicted = {1: 0.0}
        if self._worker.proposer is not None:
            both = self._doubling(1, self._most_sequences, 0, 1)
            predicted = {rows: max(0.0, both[rows] - plain[rows]) for rows in both.keys() & plain.keys()}
        named = {"plain": plain, "verified": verified, "predicted": predicted}
        in_ms = ", ".join(
            f"{name} {{{', '.join(f'{rows}: {1e3 * cost:.2f}' for rows, cost in sorted(costs.items()))}}}"
            for name, costs in named.items()
        )
        logger.info("milliseconds of a step by its rows: %s", in_ms)
        verified[1] = min(plain[1], verified[1 + self._most_drafts])
        columns = (interpolated(costs, self._most_rows) for costs in named.values())
        return StepCosts(*columns)

    def _doubling(self, rows_of_sequence: int, most_rows: int, num_drafts: int, num_passes: int) -> dict[int, float]:
        """Seconds by rows, for sequences twice as many each time, until rows cost in proportion."""
        found: dict[int, float] = {}
        count, is_linear = 1, 0
        while is_linear < 2 and count * rows_of_sequence <= most_rows:
            rows = count * rows_of_sequence
            found[rows] = self._seconds(count, num_drafts, num_passes)
            if rows // 2 in found:
                is_linear = is_linear + 1 if found[rows] > _LINEAR * found[rows // 2] else 0
            count *= 2
        return found

    def _seconds(self, num_sequences: int, num_drafts: int, num_passes: int) -> float:
        """Seconds of a step, the least of some, on the slowest rank; what the first step prepares is not counted."""
        requests = [self._request(index) for index in range(num_sequences)]
        least_s = float("inf")
        for repeat in range(1 + _REPEATS):
            step = SchedulerOutput(requests, [1 + num_drafts] * num_sequences, [[]] * num_sequences, [], 0)
            if repeat == 0:
                step.new_block_ids = [None] * num_sequences
            step.total_num_tokens = sum(step.num_tokens)
            step.drafts = {request.request_id: [0] * num_drafts for request in requests} if num_drafts else {}
            exchange = self._parallel.exchange_step(
                step.total_num_tokens, True, True, self._device, num_passes, num_sequences
            )
            start_s = time.perf_counter()
            self._worker.execute(step, exchange)
            if repeat:
                least_s = min(least_s, time.perf_counter() - start_s)
            batch = self._worker.batch
            rows = [batch.row_of[request.request_id] for request in requests]
            batch.num_computed[rows], batch.num_tokens[rows] = self._context - 1, self._context
        self._worker.batch.update(SchedulerOutput([], [], [], removed=requests, total_num_tokens=0))
        self._worker.batch.has_gaps = False
        return self._agreed(least_s)

    def _request(self, index: int) -> Request:
        request = Request(str(index), [0] * self._context, max_tokens=2, seed=index)
        request.num_computed_tokens = self._context - 1
        own = self._worker.cache.num_blocks
        num_shared = (self._context - 1) // self._size
        num_own = 1 + self._most_drafts // self._size + 1
        request.block_ids = [block % own for block in range(num_shared)] + list(range(own, own + num_own))
        return request

    def _agreed(self, seconds: float) -> float:
        mine = async_tensor_h2d(np.array([round(1e9 * seconds)], dtype=np.int64), self._device)
        everyone = self._parallel.tp.all_gather(mine)
        if self._parallel.config.steps_in_lockstep:
            everyone = self._parallel.dp.all_gather(everyone)
        return float(everyone.max()) * 1e-9
