"""The distributed optimizer with its state on the host, streamed through the device in chunks during the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.core.distributed import DistributedDataParallel, ParamAndGradBuffer
from megatron.core.distributed.offload import OffloadableTensor
from megatron.core.distributed.param_and_grad_buffer import ALIGNMENT
from megatron.core.ops import TrainOps
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, ShardState
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import ProcessGroups
from mindspeed.core.optimizer.lanes import COMPUTE, TO_DEVICE, TO_HOST, Lanes, lanes_of

# One chunk arrives while a second is updated and a third leaves, so both directions of the link are always busy.
NUM_SLOTS = 3


class HostTensor(OffloadableTensor):
    """Values that live on the host, in pinned memory where there is a device; there is nothing to offload."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.is_resident = True

    @staticmethod
    def zeros(numel: int, device: torch.device) -> HostTensor:
        """float32 [numel] on the host of ``device``."""
        return HostTensor(torch.zeros(numel, dtype=torch.float32, pin_memory=device.type != "cpu"))

    def offload(self, keep_values: bool = True) -> None:
        """Nothing to do: no device storage."""

    def onload(self, keep_values: bool = True) -> None:
        """Nothing to do: the step brings in what it needs."""


@dataclass(frozen=True)
class Chunk:
    """A piece of one shard: its three state tensors on the host, its parameters and gradients on the device."""

    on_host: tuple[torch.Tensor, ...]
    params: torch.Tensor
    grads: torch.Tensor
    group: dict[str, float]


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
        make_lanes: Callable[[torch.device], Lanes] = lanes_of,
    ) -> None:
        if swap_times < 1:
            raise ValueError(f"swap_times is {swap_times}; it must be at least 1 (16 is usual)")
        super().__init__(config, model, groups, ops)
        self.device = self.shards[0].buffer.params.tensor.device
        num_elements = sum(state.master.tensor.numel() for state in self.shards)
        self.chunk_size = -(-num_elements // (NUM_SLOTS * swap_times * ALIGNMENT)) * ALIGNMENT
        self._make_lanes = make_lanes

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Make the master weights equal to the model's again, after weights were loaded into the model."""
        for state in self.shards:
            # Cast on the host: the device has no room for the whole shard in float32.
            state.master.tensor.copy_(state.buffer.param_shard.cpu())

    def _new_state(self, buffer: ParamAndGradBuffer) -> ShardState:
        numel, device = buffer.param_shard.numel(), buffer.params.tensor.device
        state = ShardState(buffer, *(HostTensor.zeros(numel, device) for _ in range(3)))
        state.master.tensor.copy_(buffer.param_shard.cpu())
        return state

    def _update_shards(self) -> None:
        """Chunk i travels through slot i % NUM_SLOTS, which it may enter when chunk i - NUM_SLOTS has left it."""
        lanes = self._make_lanes(self.device)
        slots = torch.empty(NUM_SLOTS, 3, self.chunk_size, dtype=torch.float32, device=self.device)
        ready = lanes.submit(COMPUTE, _nothing)  # the slots' memory, and the gradients, come from this lane
        left: list[Any] = [ready] * NUM_SLOTS
        for index, chunk in enumerate(self._chunks()):
            slot = index % NUM_SLOTS
            on_device = tuple(slots[slot, :, : chunk.params.numel()])
            arrived = lanes.submit(TO_DEVICE, partial(_copy, chunk.on_host, on_device), after=[left[slot]])
            updated = lanes.submit(COMPUTE, partial(self._update, chunk, *on_device), after=[arrived])
            left[slot] = lanes.submit(TO_HOST, partial(_copy, on_device, chunk.on_host), after=[updated])
        lanes.finish()

    def _update(self, chunk: Chunk, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        self._adamw(master, exp_avg, exp_avg_sq, grads=chunk.grads, group=chunk.group)
        chunk.params.copy_(master)

    def _chunks(self) -> Iterator[Chunk]:
        for state in self.shards:
            for part, group in self._parts(state.buffer):
                for begin in range(part.start, part.stop, self.chunk_size):
                    piece = slice(begin, min(begin + self.chunk_size, part.stop))
                    yield Chunk(
                        on_host=tuple(item.tensor[piece] for item in state.tensors.values()),
                        params=state.buffer.param_shard[piece],
                        grads=state.buffer.grad_shard[piece],
                        group=group,
                    )


def get_swap_optimizer(
    config: OptimizerConfig, ddp_model: DistributedDataParallel, groups: ProcessGroups, ops: TrainOps
) -> SwapOptimizer:
    """Like ``megatron.core.optimizer.get_megatron_optimizer``, with the state on the host."""
    return SwapOptimizer(config, ddp_model, groups, ops)


def _copy(sources: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _nothing() -> None:
    """What is submitted only to be waited for."""
