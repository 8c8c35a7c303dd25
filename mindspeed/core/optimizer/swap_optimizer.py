"""The distributed optimizer with its state on the host, streamed through the device in chunks during the step."""

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
from megatron.core.optimizer.distrib_optimizer import Chunk, DistributedOptimizer, ShardState
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.streams import COMPUTE, TO_DEVICE, TO_HOST, Streams, nothing, streams_of
from megatron.core.parallel_state import ProcessGroups

# One chunk is copied in while a second is updated and a third is copied out, so both directions of the link are busy.
NUM_SLOTS = 3


class SwapOptimizer(DistributedOptimizer):
    """Master weights and both moments stay on the host (MindSpeed's ``--swap-optimizer``).

    Between steps the device holds none of the 12 bytes per parameter of the shard, during a step at most
    1/``swap_times`` of them, in ``NUM_SLOTS`` equal chunks. Copies run beside the updates on streams of their own.
    AdamW works element by element, so the updates equal the unswapped optimizer's bit for bit. ``step`` returns when
    everything is back on the host: a checkpoint never reads values that are still on their way.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: DistributedDataParallel,
        groups: ProcessGroups,
        ops: TrainOps,
        swap_times: int = 16,
        make_streams: Callable[[torch.device], Streams] = streams_of,
    ) -> None:
        if swap_times < 1:
            raise ValueError(f"swap_times is {swap_times}; it must be at least 1 (16 is usual)")
        _check(config)
        super().__init__(config, model, groups, ops)
        self.device = next(model.parameters()).device
        num_elements = sum(state.master.tensor.numel() for state in self.shards)
        self.chunk_size = -(-num_elements // (NUM_SLOTS * swap_times * ALIGNMENT)) * ALIGNMENT
        self._make_streams = make_streams

    def _new_states(self, buffer: ParamAndGradBuffer) -> list[ShardState]:
        numel, device = buffer.param_shard.numel(), buffer.params.tensor.device
        state = ShardState(buffer, 0, *(HostTensor.zeros(numel, device) for _ in range(3)))
        state.master.tensor.copy_(state.params.to(state.master.tensor.device))
        return [state]

    def _update_shards(self) -> None:
        """Chunk i uses slot i % NUM_SLOTS, which is free when chunk i - NUM_SLOTS has been copied out."""
        streams = self._make_streams(self.device)
        slots = torch.empty(NUM_SLOTS, 3, self.chunk_size, dtype=torch.float32, device=self.device)
        ready = streams.submit(COMPUTE, nothing)  # the slots' memory, and the gradients, come from this stream
        left: list[Any] = [ready] * NUM_SLOTS
        chunks = (chunk for state in self.shards for chunk in self._chunks(state, self.chunk_size))
        for index, chunk in enumerate(chunks):
            slot = index % NUM_SLOTS
            on_device = tuple(slots[slot, :, : chunk.params.numel()])
            arrived = streams.submit(TO_DEVICE, partial(_copy, chunk.state, on_device), after=[left[slot]])
            updated = streams.submit(COMPUTE, partial(self._update, chunk, on_device), after=[arrived])
            left[slot] = streams.submit(TO_HOST, partial(_copy, on_device, chunk.state), after=[updated])
        streams.finish()

    def _update(self, chunk: Chunk, on_device: tuple[Tensor, ...]) -> None:
        self._adamw(chunk, on_device, chunk.grads, chunk.params, self.ops)


def get_swap_optimizer(
    config: OptimizerConfig, ddp_model: DistributedDataParallel, groups: ProcessGroups, ops: TrainOps
) -> SwapOptimizer:
    """Like ``megatron.core.optimizer.get_megatron_optimizer``, with the state on the host."""
    return SwapOptimizer(config, ddp_model, groups, ops)


def _check(config: OptimizerConfig) -> None:
    found = [
        f"{key}_dtype is {dtype}; the swap optimizer keeps float32"
        for key, dtype in config.state_dtypes.items()
        if dtype != torch.float32
    ]
    if config.optimizer_cpu_offload:
        found.append("optimizer_cpu_offload is True; the swap optimizer updates on the device, so choose one")
    if found:
        raise ValueError("; ".join(found))


def _copy(sources: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
