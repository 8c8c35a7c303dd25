"""The distributed optimizer with its state on the host, streamed through the device in chunks during the step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.distributed import DistributedDataParallel, ParamAndGradBuffer
from megatron.core.distributed.offload import OffloadableTensor
from megatron.core.ops import TrainOps
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, ShardState
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import ProcessGroups


class HostTensor(OffloadableTensor):
    """Values that live on the host; ``tensor`` is what stands for them on the device between steps."""

    def __init__(self, values: torch.Tensor, stand_in: torch.Tensor) -> None:
        self.host = torch.empty_like(values, device="cpu", pin_memory=values.device.type != "cpu")
        self.host.copy_(values)
        self.tensor = stand_in
        self.is_resident = False

    @property
    def current(self) -> torch.Tensor:
        """The values: always the host's."""
        return self.host

    def offload(self, keep_values: bool = True) -> None:
        """Nothing to do: there is no device storage to free."""

    def onload(self, keep_values: bool = True) -> None:
        """Nothing to do: the step brings in what it needs."""


class SwapOptimizer(DistributedOptimizer):
    """Master weights and both moments stay on the host (MindSpeed's ``--swap-optimizer``).

    Between steps the device holds none of the 12 bytes per parameter of the shard; during a step it holds
    1/``swap_times`` of them. AdamW works element by element, so the updates equal the unswapped optimizer's bit
    for bit.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: DistributedDataParallel,
        groups: ProcessGroups,
        ops: TrainOps,
        swap_times: int = 16,
    ) -> None:
        if swap_times < 1:
            raise ValueError(f"swap_times is {swap_times}; it must be at least 1 (16 is usual)")
        super().__init__(config, model, groups, ops)
        self.swap_times = swap_times
        self.shards = [_to_host(state) for state in self.shards]

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Make the master weights equal to the model's again, after weights were loaded into the model."""
        for state in self.shards:
            state.master.current.copy_(state.buffer.param_shard)

    def _update_shard(self, state: ShardState) -> None:
        for span, group in zip(_spans(state.buffer), self.param_groups, strict=True):
            for part in self._chunks(*state.buffer.in_shard(span)):
                self._update_chunk(state, part, group)

    def _chunks(self, start: int, stop: int) -> Iterator[slice]:
        size = max(1, -(-(stop - start) // self.swap_times))
        for begin in range(start, stop, size):
            yield slice(begin, min(begin + size, stop))

    def _update_chunk(self, state: ShardState, part: slice, group: dict[str, float]) -> None:
        params, grads = state.buffer.param_shard[part], state.buffer.grad_shard[part]
        host = [item.current[part] for item in (state.master, state.exp_avg, state.exp_avg_sq)]
        # A copy also where the device is the host: the chunk must not alias what it is written back to.
        master, exp_avg, exp_avg_sq = on_device = [x.to(params.device, copy=True, non_blocking=True) for x in host]
        self.ops.adamw_step(
            master,
            grads.float(),
            exp_avg,
            exp_avg_sq,
            step=self.num_steps,
            lr=group["lr"],
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            eps=self.config.adam_eps,
            weight_decay=group["weight_decay"],
        )
        params.copy_(master)
        for old, new in zip(host, on_device, strict=True):
            old.copy_(new)  # waits, so a checkpoint never reads values that are still on their way


def get_swap_optimizer(
    config: OptimizerConfig, ddp_model: DistributedDataParallel, groups: ProcessGroups, ops: TrainOps
) -> SwapOptimizer:
    """Like ``megatron.core.optimizer.get_megatron_optimizer``, with the state on the host."""
    return SwapOptimizer(config, ddp_model, groups, ops)


def _to_host(state: ShardState) -> ShardState:
    """The same state on the host, its device storage freed.

    ``step`` reads the updated weights from ``master.tensor``: that is the parameters, which the chunks have written.
    """
    params = state.buffer.param_shard
    nothing = params[:0]
    on_host = ShardState(
        state.buffer,
        master=HostTensor(state.master.tensor, stand_in=params),
        exp_avg=HostTensor(state.exp_avg.tensor, stand_in=nothing),
        exp_avg_sq=HostTensor(state.exp_avg_sq.tensor, stand_in=nothing),
    )
    for item in state.tensors.values():
        item.offload(keep_values=False)
    return on_host


def _spans(buffer: ParamAndGradBuffer) -> tuple[tuple[int, int], tuple[int, int]]:
    """(decayed, not decayed) elements of a buffer, in the order of ``param_groups``."""
    first_undecayed = buffer.decayed[1]
    return (0, first_undecayed), (first_undecayed, buffer.numel)
