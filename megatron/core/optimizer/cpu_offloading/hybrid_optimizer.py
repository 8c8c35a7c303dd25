"""CPU Adam: optimizer state stays on the host and is updated there; gradients and weights cross the link."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, ParamAndGradBuffer
from megatron.core.distributed.offload import HostTensor
from megatron.core.distributed.param_and_grad_buffer import ALIGNMENT
from megatron.core.ops import TrainOps
from megatron.core.ops.cpu import cpu_ops
from megatron.core.optimizer.distrib_optimizer import CHUNK_SIZE, Chunk, DistributedOptimizer, ShardState
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.streams import COMPUTE, HOST, TO_DEVICE, TO_HOST, Streams, nothing, streams_of
from megatron.core.parallel_state import ProcessGroups

# The gradients of one chunk are copied in while a second is updated and the weights of a third are copied out.
NUM_SLOTS = 3


class HybridDeviceOptimizer(DistributedOptimizer):
    """Keeps ``optimizer_offload_fraction`` of each shard on the host; the rest is updated on the device as usual.

        device gradients --(cast to main_grads_dtype)--> slot[i % 3] --AdamW on the CPU--> slot[i % 3] --> parameters
                              to_host stream                 host                          to_device stream

    Chunk i + 1 is copied in and chunk i - 1 out while the CPU updates chunk i (``overlap_cpu_optimizer_d2h_h2d``; else
    one after the other). The host's state never crosses the link, so it is ordinary memory; only the slots are pinned.
    The result does not depend on the fraction, the chunks or the overlap, and equals that of a plain optimizer on the
    CPU with ``cpu_ops`` bit for bit. ``step`` returns when the last weights are on the device.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: DistributedDataParallel,
        groups: ProcessGroups,
        ops: TrainOps,
        chunk_size: int = CHUNK_SIZE,
        make_streams: Callable[[torch.device, bool], Streams] = streams_of,
    ) -> None:
        super().__init__(config, model, groups, ops)
        self.device = next(model.parameters()).device
        self.host_ops = cpu_ops()
        self._make_streams = make_streams
        self.on_host = [state for state in self.shards if isinstance(state.master, HostTensor)]
        self.on_device = [state for state in self.shards if not isinstance(state.master, HostTensor)]
        self._chunk_size = min(chunk_size, max((state.numel for state in self.on_host), default=0))
        grads = {self._grad_dtype(state.buffer) for state in self.on_host}
        params = {state.buffer.params.tensor.dtype for state in self.on_host}
        for dtype in grads:
            self.host_slots[f"gradients {dtype}"] = self._new_slots(dtype, config.pin_cpu_grads)
        for dtype in params:
            self.host_slots[f"parameters {dtype}"] = self._new_slots(dtype, config.pin_cpu_params)

    def _new_states(self, buffer: ParamAndGradBuffer) -> list[ShardState]:
        numel = buffer.param_shard.numel()
        cut = min(-(-round(self.config.optimizer_offload_fraction * numel) // ALIGNMENT) * ALIGNMENT, numel)
        states = [self._new_host_state(buffer, cut)] if cut else []
        return states + ([self._new_state(buffer, cut, numel)] if cut < numel else [])

    def _new_host_state(self, buffer: ParamAndGradBuffer, numel: int) -> ShardState:
        device = buffer.params.tensor.device
        state = ShardState(
            buffer,
            0,
            *(HostTensor.zeros(numel, device, dtype, is_pinned=False) for dtype in self.config.state_dtypes.values()),
        )
        state.master.tensor.copy_(state.params.to(state.master.tensor.device))
        return state

    def _new_slots(self, dtype: torch.dtype, is_pinned: bool) -> HostTensor:
        return HostTensor.zeros(NUM_SLOTS * self._chunk_size, self.device, dtype, is_pinned=is_pinned)

    def _grad_dtype(self, buffer: ParamAndGradBuffer) -> torch.dtype:
        """Gradients cross the link in the narrower of their own dtype and the configured one."""
        return min(buffer.grads.tensor.dtype, self.config.main_grads_dtype, key=lambda dtype: dtype.itemsize)

    def _update_shards(self) -> None:
        """Chunk i goes through slots i % NUM_SLOTS; it may enter each when chunk i - NUM_SLOTS has left it."""
        streams = self._make_streams(self.device, self.config.overlap_cpu_optimizer_d2h_h2d)
        ready = streams.submit(COMPUTE, nothing)  # the gradients come from this stream
        chunks = [chunk for state in self.on_host for chunk in self._chunks(state, self._chunk_size)]
        fetched: list[Any] = []
        updated: list[Any] = [ready] * NUM_SLOTS  # of chunk i at i + NUM_SLOTS
        returned: list[Any] = [ready] * NUM_SLOTS
        for index, chunk in enumerate(chunks):
            while len(fetched) < min(len(chunks), index + NUM_SLOTS):
                coming = len(fetched)
                work = partial(self._fetch, chunks[coming], self._grad_slot(chunks[coming], coming))
                fetched.append(streams.submit(TO_HOST, work, after=[ready, updated[coming]]))
            if index == 0:
                streams.submit(COMPUTE, partial(self._update_on_device, self.on_device))
            slots = self._grad_slot(chunk, index), self._param_slot(chunk, index)
            work = partial(self._update_on_host, chunk, *slots)
            updated.append(streams.submit(HOST, work, after=[fetched[index], returned[index]]))
            work = partial(_copy, slots[1], chunk.params)
            returned.append(streams.submit(TO_DEVICE, work, after=[ready, updated[-1]]))
        if not chunks:
            self._update_on_device(self.on_device)
        streams.finish()

    def _fetch(self, chunk: Chunk, slot: Tensor) -> None:
        _copy(chunk.grads.to(slot.dtype), slot)  # cast on the device, so that the narrow values travel

    def _update_on_host(self, chunk: Chunk, grads: Tensor, params: Tensor) -> None:
        self._adamw(chunk, chunk.state, grads, params, self.host_ops)

    def _grad_slot(self, chunk: Chunk, index: int) -> Tensor:
        return self._slot(f"gradients {self._grad_dtype(chunk.buffer)}", chunk, index)

    def _param_slot(self, chunk: Chunk, index: int) -> Tensor:
        return self._slot(f"parameters {chunk.params.dtype}", chunk, index)

    def _slot(self, name: str, chunk: Chunk, index: int) -> Tensor:
        return self.host_slots[name].tensor.view(NUM_SLOTS, -1)[index % NUM_SLOTS, : chunk.params.numel()]


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)
