"""Decode steps as captured graphs: fixed input buffers, padded batch sizes, and updates beside a replay."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext
from vllm.ops.contract import DecodeMetadata, KVCache
from vllm.platforms import CapturedGraph, GraphPool
from vllm.utils import HAS_NO_STREAM, pinned_empty
from vllm.v1.worker.input_batch import StepInputs
from vllm.v1.worker.rank_context import RankContext

logger = logging.getLogger(__name__)

Forward: TypeAlias = Callable[[Tensor, list[KVCache], ForwardContext], Tensor]
"""(ids int64 [S], caches, context) -> hidden states [S, H]."""


def num_scratch_blocks(config: VllmConfig) -> int:
    """Return the number of KV blocks for the padding of the largest graph; 0 without graphs."""
    if config.compilation.enforce_eager:
        return 0
    return -(-config.compilation.cudagraph_capture_sizes[-1] // config.cache.block_size)


class _Input:
    """One input of the steps, on the host and in a device buffer; the same memory where the device is the host."""

    def __init__(self, host: np.ndarray, device: torch.device) -> None:
        self._host, shared = host, torch.from_numpy(host)
        self.buffer = shared.to(device)
        self._staging = shared if device.type in HAS_NO_STREAM else pinned_empty(shared)

    def fill(self, values: np.ndarray, padding: int | np.ndarray, size: int, width: int | None = None) -> None:
        """Write rows of `values`, then of `padding` up to `size`; a table's first `width` columns only."""
        part = np.s_[:size] if width is None else np.s_[:size, :width]
        host, rows = self._host[part], len(values)
        host[:rows], host[rows:] = values, padding
        if self.buffer is not self._staging:  # the host reads the tokens of this step before it writes there again
            staged = self._staging[part].copy_(torch.from_numpy(host))
            self.buffer[part].copy_(staged, non_blocking=True)


@dataclass(frozen=True)
class _DecodeGraph:
    """The graph of one size and the functions that update the host values in it, which its replay waits for."""

    graph: CapturedGraph
    renewals: list[Callable[[], None]]
    states_SH: Tensor


class DecodeGraphs:
    """One graph for each batch size, all over the same input buffers and in one memory pool.

    A step of B rows runs the smallest graph of at least B. The rows after B are padding: token 0 at position 0 of a
    sequence of length 1 in the scratch blocks, which no request owns: they read finite values there, and each writes to
    a slot of its own. The cache has `num_scratch_blocks` of them behind the `num_blocks` of the scheduler.

    The first step of a size runs eagerly on the buffers and is captured afterwards, so that kernels, workspaces and
    communicators exist when capture begins; where a capture also runs, it is that step. A step runs the same number of
    collectives in either case.

    A graph holds the addresses of weights and KV cache. Call `sleep` before they are freed. Where the platform keeps
    graphs over a sleep, the first step afterwards compares these addresses: if one has changed, the graphs are dropped,
    and later steps capture again, as they do on other platforms.
    Letters: B rows of a step, S rows of the buffers, W blocks of a table, H hidden size, V vocabulary.
    """

    def __init__(
        self,
        rank: RankContext,
        forward: Forward,
        num_blocks: int,
        freed_by_sleep: Callable[[], list[Tensor]],
        compute_logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Prepare to capture ``forward`` and, where it is given and they are few, ``compute_logits`` of its result.

        freed_by_sleep: returns what graphs read besides memory of their own, always in the same order.
        """
        config, device = rank.config, rank.device
        self.sizes = config.compilation.cudagraph_capture_sizes
        self._forward, self._compute_logits, self._platform = forward, compute_logits, rank.platform
        self._num_replicas = config.parallel.data_parallel_size if config.parallel.steps_in_lockstep else 1
        self._logits_rows = 0  # rows of the largest graph that computes logits
        if compute_logits is not None and config.parallel.tensor_parallel_size == 1:
            self._logits_rows = rank.platform.captured_logits_bytes // (4 * config.model.hf.vocab_size)
        self._block_size = config.cache.block_size
        self._num_blocks = num_blocks
        self._pool: GraphPool | None = None
        self._graphs: dict[int, _DecodeGraph] = {}
        self._freed_by_sleep = freed_by_sleep
        self._captured_addresses: list[int] = []
        self._has_slept = False
        self.states_BH: Tensor | None = None  # of the last `run`, whether or not that returned logits
        self.num_captures = self.num_kept_over_sleep = 0  # so far, of all sizes
        largest, width = self.sizes[-1], -(-config.model.max_model_len // self._block_size)
        # Row i of every buffer is row i of the step, whatever its size: the graphs share them.
        self._ids_S = _Input(np.zeros(largest, dtype=np.int64), device)
        self._positions_S = _Input(np.zeros(largest, dtype=np.int64), device)
        self._slots_S = _Input(np.zeros(largest, dtype=np.int64), device)
        self._seq_lens_S = _Input(np.ones(largest, dtype=np.int32), device)
        self._tables_SW = _Input(np.zeros((largest, width), dtype=np.int32), device)
        self._host_seq_lens_S = np.ones(largest, dtype=np.int64)

    @property
    def captured_sizes(self) -> list[int]:
        """The sizes that have a graph."""
        return sorted(self._graphs)

    @property
    def input_buffers(self) -> list[Tensor]:
        """The device buffers that the steps read."""
        inputs = (self._ids_S, self._positions_S, self._slots_S, self._seq_lens_S, self._tables_SW)
        return [given.buffer for given in inputs]

    def size_for(self, num_rows: int) -> int | None:
        """Return the size at which a decode step of `num_rows` runs; None for an empty step or one beyond all sizes."""
        if not 0 < num_rows <= self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def makes_logits(self, size: int) -> bool:
        """Whether `run` of this size returns logits: one graph then holds the whole model."""
        return size <= self._logits_rows

    def run(self, inputs: StepInputs, tables_BW: np.ndarray, size: int, caches: list[KVCache]) -> Tensor:
        """Return hidden states [B, H], or logits [B, V], of a decode step of B <= `size` rows with block tables int32
        [B, W]; the next call overwrites them.

        In lock-step every replica calls it with the same `size`, and one without work with B = 0.
        """
        if self._has_slept:
            self._drop_if_memory_moved()
        self._fill(inputs, tables_BW, size)
        captured = self._graphs.get(size)
        if captured is None:
            return self._run_and_capture(size, caches, len(inputs.token_ids_T))
        captured.graph.replay()
        for renew in captured.renewals:
            renew()
        self.states_BH = captured.states_SH[: len(inputs.token_ids_T)]
        return captured.graph.output[: len(inputs.token_ids_T)]

    def sleep(self) -> None:
        """Prepare for the memory that graphs read to be freed."""
        if self._platform.keeps_graphs_over_sleep:
            self._has_slept = bool(self._graphs)
        else:
            self.drop()

    def drop(self) -> None:
        """Release all graphs, and with them every reference to weights, caches and pool memory."""
        for captured in self._graphs.values():
            captured.graph.release()
        self._graphs.clear()
        self.states_BH = None
        self._pool = None

    def _drop_if_memory_moved(self) -> None:
        self._has_slept = False
        if self._addresses() == self._captured_addresses:
            self.num_kept_over_sleep += len(self._graphs)
        else:
            logger.info("%d graphs are captured again: a sleep has moved what they read", len(self._graphs))
            self.drop()

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._freed_by_sleep()]

    def _run_and_capture(self, size: int, caches: list[KVCache], num_rows: int) -> Tensor:
        lens_S, tables_SW = self._seq_lens_S.buffer[:size], self._tables_SW.buffer[:size]
        decode = DecodeMetadata(self._host_seq_lens_S[:size], lens_S, tables_SW, self._block_size)
        context = ForwardContext(
            num_tokens=size,
            num_decode_tokens=size,
            positions_T=self._positions_S.buffer[:size],
            slots_T=self._slots_S.buffer[:size],
            decode=decode,
            prefill=None,
            dp_token_counts=[size] * self._num_replicas,
        )

        states: list[Tensor] = []

        def forward() -> Tensor:
            decode.scratch.clear()
            states.append(self._forward(self._ids_S.buffer[:size], caches, context))
            if self._compute_logits is None or not self.makes_logits(size):
                return states[-1]
            return self._compute_logits(states[-1])

        if self._pool is None:
            self._pool = self._platform.graph_pool()
            assert self._pool is not None, self._platform.name
        eager_output = None if self._pool.runs_captures else forward()
        renewals: list[Callable[[], None]] = []
        decode.renewals = renewals
        graph = self._pool.capture(forward)
        self._graphs[size] = _DecodeGraph(graph, renewals, states[-1])
        self.states_BH = states[0][:num_rows]
        self._captured_addresses = self._addresses()
        self.num_captures += 1
        logger.info("captured a decode step of %d sequences", size)
        return (graph.output if eager_output is None else eager_output)[:num_rows]

    def _fill(self, inputs: StepInputs, tables_BW: np.ndarray, size: int) -> None:
        rows, width = tables_BW.shape
        self._host_seq_lens_S[:rows], self._host_seq_lens_S[rows:size] = inputs.seq_lens_B, 1
        first_scratch_slot = self._num_blocks * self._block_size
        self._ids_S.fill(inputs.token_ids_T, 0, size)
        self._positions_S.fill(inputs.positions_T, 0, size)
        self._slots_S.fill(inputs.slots_T, first_scratch_slot + np.arange(size - rows), size)
        self._seq_lens_S.fill(inputs.seq_lens_B, 1, size)
        self._tables_SW.fill(tables_BW, self._num_blocks, size, width)
