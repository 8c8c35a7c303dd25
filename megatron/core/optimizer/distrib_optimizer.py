"""AdamW on one shard of each flat buffer: every replica updates its part and the parts are gathered."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed import (
    DistributedDataParallel,
    NonFiniteGradientError,
    NonFiniteGrads,
    ParamAndGradBuffer,
)
from megatron.core.distributed.finite_check import find_non_finite
from megatron.core.distributed.offload import HostTensor, OffloadableTensor, SharedTensor
from megatron.core.ops import TrainOps
from megatron.core.ops.contract import AdamwSettings
from megatron.core.optimizer.clip_grads import clip_coefficient, get_grad_norm_fp32, local_square_sum
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import ProcessGroups

logger = logging.getLogger(__name__)


# Elements of one update: its temporaries stay small, and on a CPU part of it in the caches.
CHUNK_SIZE = 1 << 22

MAX_SKIPPED_IN_ROW = 3  # a bad micro-batch comes alone; weights or data that are broken come again


@dataclass(frozen=True)
class ShardState:
    """State of the elements from ``start`` on of one buffer's shard: tensors [numel] in the config's dtypes.

    Parameters in fp32 are their own master weights, unless the master weights live elsewhere, on the host.
    """

    buffer: ParamAndGradBuffer
    start: int
    master: OffloadableTensor
    exp_avg: OffloadableTensor
    exp_avg_sq: OffloadableTensor

    @property
    def tensors(self) -> dict[str, OffloadableTensor]:
        """The state by the name it has in checkpoints."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @property
    def numel(self) -> int:
        return self.master.tensor.numel()

    @property
    def name(self) -> str:
        """The buffer's name, followed by the first element's index unless that is 0."""
        return f"{self.buffer.name}.{self.start}" if self.start else self.buffer.name

    @property
    def params(self) -> Tensor:
        """The parameters of these elements, in their own dtype."""
        return self.buffer.param_shard[self.start : self.start + self.numel]

    @property
    def grads(self) -> Tensor:
        """The gradients of these elements."""
        return self.buffer.grad_shard[self.start : self.start + self.numel]


@dataclass(frozen=True)
class ParamShard:
    """Elements [start, stop) of one flattened local parameter and their optimizer state, as checkpoints save them.

    name: the parameter's name in ``named_parameters`` of the wrapped module · shape: shape of the local parameter ·
    tensors: flat views [stop - start] of the state itself (of the host's copy while offloaded) by "master", "exp_avg"
    and "exp_avg_sq"; a save reads them, a load writes them in place.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Elements of one shard that are updated together; ``state`` is (master, exp_avg, exp_avg_sq)."""

    buffer: ParamAndGradBuffer
    state: tuple[Tensor, ...]
    params: Tensor
    grads: Tensor
    group: dict[str, float]


class DistributedOptimizer:
    """One step is: global norm, clip, AdamW on the fp32 master shard, cast to the parameters, all-gather.

    Call after ``finalize_model_grads``. ``param_groups`` (decayed, not decayed) holds ``lr`` and ``weight_decay`` as
    torch's optimizers do; schedulers write ``lr`` there. Without data parallelism there are no collectives but the
    norm's.
    """

    def __init__(
        self, config: OptimizerConfig, model: DistributedDataParallel, groups: ProcessGroups, ops: TrainOps
    ) -> None:
        self.config = config
        self.model = model
        self.groups = groups
        self.ops = ops
        self.num_steps = 0
        self._num_skipped_in_row = 0
        self.clip_coefficients = [1.0, 1.0]  # of the update under way: of the model, of what has its own norm
        self.param_groups: list[dict[str, float]] = [
            {"lr": config.lr, "weight_decay": config.weight_decay},
            {"lr": config.lr, "weight_decay": 0.0},
        ]
        self.host_slots: dict[str, HostTensor] = {}  # memory through which an update passes, by name
        self.shards = [state for buffer in model.param_and_grad_buffers for state in self._new_states(buffer)]

    @torch.no_grad()
    def step(self, loss: Tensor | None = None) -> tuple[bool, float, int | None]:
        """Update the parameters; collective over the world. Returns (updated, gradient norm before clipping, None).

        The norm leaves out what has a norm of its own, which must be finite too.
        ``loss`` is what this rank has of the step's loss, if any; one that is not finite counts as such a gradient.
        When the norm is not finite nothing changes and the first element is False on every rank; the ranks with such
        gradients log them (with ``check_for_nan_in_grad`` also the first micro-batch). The third such step in a row,
        and with ``config.on_non_finite_grads`` "stop" the first, raises ``NonFiniteGradientError`` on every rank, which
        lists the gradients of all ranks.
        """
        assert self.model.grads_are_final, "call finalize_model_grads() between the last backward and step()"
        self.model.finish_param_sync()  # the shards must not change while an earlier step's are still being gathered
        square_sums = self._counted_square_sums()
        if loss is not None:
            square_sums = square_sums + 0.0 * loss.detach().to(square_sums)  # NaN everywhere, without a collective more
        grad_norms = get_grad_norm_fp32(square_sums, self.groups.world)
        for grad_norm in grad_norms:
            if not math.isfinite(grad_norm):
                self._num_skipped_in_row += 1
                self._report_non_finite(grad_norm)
                return False, grad_norm, None
        self._num_skipped_in_row = 0
        self.clip_coefficients = [clip_coefficient(self.config.clip_grad, grad_norm) for grad_norm in grad_norms]
        self.num_steps += 1
        self._update_shards()
        self.model.start_param_sync()
        return True, grad_norms[0], None

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()

    def offload(self) -> None:
        """Move the state to the host and free its device storage."""
        for state in self.shards:
            for tensor in state.tensors.values():
                tensor.offload()

    def onload(self) -> None:
        for state in self.shards:
            for tensor in state.tensors.values():
                tensor.onload()

    def param_shards(self) -> Iterator[ParamShard]:
        """All state of this rank by parameter, every element once, without padding; no collectives.

        A parameter may come in several parts or, when another rank owns its shard, not at all. Without
        ``use_distributed_optimizer`` every replica yields everything.
        """
        for state in self.shards:
            tensors = {key: item.current for key, item in state.tensors.items()}
            first = state.buffer.shard[0] + state.start
            last = first + state.numel
            for name, (param_start, param_stop) in state.buffer.param_ranges.items():
                start, stop = max(param_start, first), min(param_stop, last)
                if start < stop:
                    own = {key: tensor[start - first : stop - first] for key, tensor in tensors.items()}
                    shape = state.buffer.param_shapes[name]
                    yield ParamShard(name, shape, start - param_start, stop - param_start, own)

    def state_dict(self) -> dict[str, Tensor | float | int]:
        """Tensors (this rank's shards, not copies, on the host while offloaded) and scalars (equal on all ranks)."""
        state: dict[str, Tensor | float | int] = {"num_steps": self.num_steps}
        for index, group in enumerate(self.param_groups):
            state.update({f"param_groups.{index}.{key}": value for key, value in group.items()})
        for shard in self.shards:
            state.update({f"{shard.name}.{key}": item.current for key, item in shard.tensors.items()})
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Tensor | float | int]) -> None:
        """Load the ``state_dict()`` of the same model in the same layout; of the parameters only fp32 ones change.

        Raises ``ValueError`` when names or shapes differ.
        """
        own = self.state_dict()
        problems = [f"{key} is missing" for key in own.keys() - state_dict.keys()]
        problems += [f"{key} is unknown" for key in state_dict.keys() - own.keys()]
        problems += [
            f"{key} has shape {tuple(torch.as_tensor(state_dict[key]).shape)}, expected {tuple(value.shape)}"
            for key, value in own.items()
            if isinstance(value, Tensor) and key in state_dict and torch.as_tensor(state_dict[key]).shape != value.shape
        ]
        if problems:
            raise ValueError("optimizer state: " + "; ".join(sorted(problems)))
        self.num_steps = int(state_dict["num_steps"])
        for index, group in enumerate(self.param_groups):
            for key in group:
                group[key] = float(state_dict[f"param_groups.{index}.{key}"])
        for key, value in own.items():
            if isinstance(value, Tensor):
                value.copy_(torch.as_tensor(state_dict[key]))

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Set the master weights to the parameters, after these were loaded alone; moments and step count stay."""
        for state in self.shards:
            state.master.current.copy_(state.params)

    def _report_non_finite(self, grad_norm: float) -> None:
        """Log this rank's non-finite gradients, and raise if configured (collective over the world in that case)."""
        found = self.model.non_finite_grads
        if found is None:  # not checked before the reduction; after it only this rank's shards are valid
            order = {name: index for index, (name, _) in enumerate(self.model.module.named_parameters())}
            grads = {item.name: (item, item.shard[0], item.grad_shard) for item in self.model.param_and_grad_buffers}
            found = find_non_finite(grads, order, self.groups.rank)
        is_stop = self.config.on_non_finite_grads == "stop" or self._num_skipped_in_row >= MAX_SKIPPED_IN_ROW
        if found is not None:
            what = "the run stops" if is_stop else "the step is skipped"
            logger.error("the gradient norm is %s, %s: %s", grad_norm, what, found)
        if is_stop:
            everywhere: list[NonFiniteGrads | None] = [None] * self.groups.world.size()
            dist.all_gather_object(everywhere, found, group=self.groups.world)
            lines = [str(item) for item in everywhere if item is not None]
            lines = lines or ["all gradients are finite, so the loss is not, or the squares of gradients overflow"]
            raise NonFiniteGradientError(
                f"the gradient norm is {grad_norm} in {self._num_skipped_in_row} steps in a row, after "
                f"{self.num_steps} updates. Go on from an earlier checkpoint with a lower learning rate or clip_grad, "
                f"and with check_for_nan_in_grad to find the micro-batch. {'; '.join(lines)}"
            )

    def _counted_square_sums(self) -> Tensor:
        """This rank's share of the squared norms [2]: over all ranks every element is counted exactly once.

        The second norm is that of the buffers that have one of their own. Both are always there and summed together, so
        that what the second counts changes no bit of the first.

        Shards are disjoint over the replicas; unsharded buffers count on their first replica; weights that all TP
        ranks hold count on TP rank 0, an embedding that two stages share on the one that owns it. PP stages, experts
        and the parts of an expert are disjoint anyway. Gaps and padding are zero.
        """
        counted: tuple[list[Tensor], list[Tensor]] = [], []
        for buffer in self.model.param_and_grad_buffers:
            if buffer.is_counted_elsewhere or (buffer.num_shards == 1 and buffer.group.rank() != 0):
                continue
            grads = buffer.grad_shard
            start, end = buffer.in_shard(buffer.tp_duplicates if self.groups.coords.tp else (0, 0))
            counted[buffer.has_own_norm].extend(part for part in (grads[:start], grads[end:]) if part.numel())
        nothing = torch.zeros((), device=next(self.model.parameters()).device)
        return torch.stack([local_square_sum(parts) if parts else nothing for parts in counted])

    def _new_states(self, buffer: ParamAndGradBuffer) -> list[ShardState]:
        """State for every element of the buffer's shard, one part for each device that stores some of it."""
        return [self._new_state(buffer, 0, buffer.param_shard.numel())]

    def _new_state(self, buffer: ParamAndGradBuffer, start: int, stop: int) -> ShardState:
        """State on the device: master weights equal to the parameters (those themselves in fp32), moments zero."""
        params, dtypes = buffer.param_shard[start:stop], self.config.state_dtypes
        if params.dtype == dtypes.pop("master"):
            first = buffer.shard[0]
            master: OffloadableTensor = SharedTensor(buffer.params, first + start, first + stop)
        else:
            master = OffloadableTensor(params.to(torch.float32))
        zeros = (OffloadableTensor(torch.zeros_like(params, dtype=dtype)) for dtype in dtypes.values())
        return ShardState(buffer, start, master, *zeros)

    def _update_shards(self) -> None:
        """One AdamW step on every shard's state, then copy the master weights to the shard's parameters."""
        self._update_on_device(self.shards)

    def _update_on_device(self, states: Sequence[ShardState]) -> None:
        for state in states:
            is_shared = isinstance(state.master, SharedTensor)
            for chunk in self._chunks(state, CHUNK_SIZE):
                params = None if is_shared else chunk.params
                self._adamw(chunk, chunk.state, chunk.grads, params, self.ops)

    def _chunks(self, state: ShardState, size: int) -> Iterator[Chunk]:
        """All elements of ``state`` in chunks of at most ``size``, each with one group: decayed or undecayed."""
        first_undecayed = state.buffer.decayed[1]
        spans = ((0, first_undecayed), (first_undecayed, state.buffer.numel))
        for span, group in zip(spans, self.param_groups, strict=True):
            start, stop = (index - state.start for index in state.buffer.in_shard(span))
            for begin in range(max(start, 0), min(stop, state.numel), size):
                part = slice(begin, min(begin + size, stop, state.numel))
                tensors = tuple(item.tensor[part] for item in state.tensors.values())
                yield Chunk(state.buffer, tensors, state.params[part], state.grads[part], group)

    def _adamw(
        self, chunk: Chunk, state: tuple[Tensor, ...], grads: Tensor, params: Tensor | None, ops: TrainOps
    ) -> None:
        """One step on ``state`` and the parameters, if these are others; ``grads`` are of no use after it."""
        betas, eps, group = (self.config.adam_beta1, self.config.adam_beta2), self.config.adam_eps, chunk.group
        clip = self.clip_coefficients[chunk.buffer.has_own_norm]
        how = AdamwSettings(self.num_steps, group["lr"], betas, eps, group["weight_decay"], clip)
        master, exp_avg, exp_avg_sq = state
        ops.adamw_step(master, grads, exp_avg, exp_avg_sq, how, params)
