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
_ROUNDS = 6
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
        sequences, own = self._most_sequences, self._most_drafts
        plain, verified = self._doubling(sequences, 0, 0), self._doubling(self._most_rows // (1 + own), own, 0)
        both = {} if self._worker.proposer is None else self._doubling(sequences, 0, 1)
        for _ in range(_ROUNDS - 1):  # apart from each other: what disturbs one round is gone in another
            for found, drafts_and_passes in ((plain, (0, 0)), (verified, (own, 0)), (both, (0, 1))):
                for count in found:
                    found[count] = min(found[count], self._seconds(count, *drafts_and_passes))
        verified = {count * (1 + own): cost for count, cost in verified.items()} | {1: min(plain[1], verified[1])}
        predicted = {rows: max(0.0, both[rows] - plain[rows]) for rows in both.keys() & plain.keys()} or {1: 0.0}
        columns = {"plain": plain, "verified": verified, "predicted": predicted}
        in_ms = ", ".join(
            f"{name} {{{', '.join(f'{rows}: {1e3 * cost:.2f}' for rows, cost in sorted(costs.items()))}}}"
            for name, costs in columns.items()
        )
        logger.info("milliseconds of a step by its rows: %s", in_ms)
        return StepCosts(*(interpolated(costs, self._most_rows) for costs in columns.values()))

    def _doubling(self, most_sequences: int, num_drafts: int, num_passes: int) -> dict[int, float]:
        """Seconds by sequences, twice as many each time, until these cost in proportion."""
        found: dict[int, float] = {}
        count, is_linear = 1, 0
        while is_linear < 2 and count <= max(1, most_sequences):
            self._seconds(count, num_drafts, num_passes)  # prepares what later steps have
            found[count] = self._seconds(count, num_drafts, num_passes)
            if count // 2 in found:
                is_linear = is_linear + 1 if found[count] > _LINEAR * found[count // 2] else 0
            count *= 2
        return found

    def _seconds(self, num_sequences: int, num_drafts: int, num_passes: int) -> float:
        """Seconds of a step on the slowest rank."""
        requests = [self._request(index) for index in range(num_sequences)]
        step = SchedulerOutput(requests, [1 + num_drafts] * num_sequences, [None] * num_sequences, [], 0)
        step.total_num_tokens = sum(step.num_tokens)
        step.drafts = {request.request_id: [0] * num_drafts for request in requests} if num_drafts else {}
        facts = step.total_num_tokens, True, True
        exchange = self._parallel.exchange_step(*facts, self._device, num_passes, num_sequences)
        self._worker.batch.update(step)  # not timed: running requests have their rows
        step.new_block_ids = [[]] * num_sequences
        start_s = time.perf_counter()
        self._worker.execute(step, exchange)
        seconds = time.perf_counter() - start_s
        self._worker.batch.update(SchedulerOutput([], [], [], removed=requests, total_num_tokens=0))
        self._worker.batch.has_gaps = False
        return self._agreed(seconds)

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
