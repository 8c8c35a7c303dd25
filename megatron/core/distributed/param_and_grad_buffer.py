"""One flat parameter buffer and one flat gradient buffer for all parameters of one kind, dtype and replica group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.offload import OffloadableTensor
from megatron.core.tensor_parallel.collectives import all_gather_in_place, reduce_scatter_in_place

# Every parameter starts at a multiple of this many elements, so that device ops meet aligned addresses.
ALIGNMENT = 64

Range = tuple[int, int]  # [start, end) in elements


class ParamAndGradBuffer:
    """Makes ``params`` views of one flat buffer and gives each a ``main_grad`` view of another.

    An op that has added a gradient to ``main_grad`` itself sets ``grad_added_to_main_grad`` (see
    ``contract.GroupedMatmul``).

    A step treats parameters differently in three ways: weight decay, whether all TP ranks hold the same weight, and
    whether its gradient is partial over TP. Parameters are laid out so that each of these is one range of the buffer
    and no step needs a loop over parameters:

        | decay, TP-sharded | decay, replicated | decay, partial | no decay, partial | no decay, replicated | ... |

    Gaps and padding (the size is a multiple of the group's) always hold zeros in parameters and gradients.

    param_ranges, param_shapes: where each parameter lies, by name, and its local shape ·
    first_param: place of the first parameter among all of the model's, the one whose gradient comes last ·
    is_shared_embedding: holds only an embedding that two pipeline stages have a copy of, whose shards lie alike on
    both · is_counted_elsewhere: this is the copy that the gradient norm leaves out ·
    has_own_norm: its gradients count in a norm beside the model's, by which they are clipped ·
    decayed: parameters under weight decay · tp_duplicates: equal on all TP ranks, to be counted once ·
    tp_partial: gradients to be summed over TP · shard: the part of the buffer whose optimizer state this rank owns.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        *,
        is_expert: bool,
        grad_dtype: torch.dtype,
        is_sharded: bool,
        first_param: int = 0,
    ) -> None:
        self.name = name
        self.first_param = first_param
        self.group = group
        self.group_size = group.size()
        self.is_expert = is_expert
        self.num_shards = self.group_size if is_sharded else 1
        shard_index = group.rank() if is_sharded else 0

        self.is_shared_embedding = any(getattr(param, "shared_embedding", False) for _, param in params)
        self.is_counted_elsewhere = any(getattr(param, "shared", False) for _, param in params)
        self.has_own_norm = any(getattr(param, "has_own_norm", False) for _, param in params)
        assert len(params) == 1 or not self.is_shared_embedding, "a shared embedding has a buffer of its own"

        kinds = {name: _layout_class(name, param, is_expert) for name, param in params}
        ordered = sorted(params, key=lambda item: kinds[item[0]])
        self.param_ranges, numel = assign_ranges(ordered)
        self.param_shapes = {name: tuple(param.shape) for name, param in ordered}
        shard_numel = -(-numel // (self.num_shards * ALIGNMENT)) * ALIGNMENT
        self.numel = shard_numel * self.num_shards
        self.shard: Range = (shard_index * shard_numel, (shard_index + 1) * shard_numel)

        self.decayed = _span([span for name, span in self.param_ranges.items() if kinds[name] <= 2])
        self.tp_duplicates = _span([span for name, span in self.param_ranges.items() if 1 <= kinds[name] <= 4])
        self.tp_partial = _span([span for name, span in self.param_ranges.items() if 2 <= kinds[name] <= 3])

        first = ordered[0][1]
        self.params = OffloadableTensor(torch.zeros(self.numel, dtype=first.dtype, device=first.device))
        self.grads = OffloadableTensor(torch.zeros(self.numel, dtype=grad_dtype, device=first.device))
        move_into(self.params.tensor, ordered, self.param_ranges)
        for param_name, param in ordered:
            start, end = self.param_ranges[param_name]
            param.main_grad = self.grads.tensor[start:end].view(param.shape)  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self._grad_work: dist.Work | None = None
        self._param_work: dist.Work | None = None

    @property
    def param_shard(self) -> Tensor:
        """This rank's part of the parameters, [numel / num_shards] in their dtype."""
        return self.params.tensor[slice(*self.shard)]

    @property
    def grad_shard(self) -> Tensor:
        """This rank's part of the gradients; complete after ``wait_for_grads``."""
        return self.grads.tensor[slice(*self.shard)]

    def start_grad_sync(self, scale: float) -> None:
        """Multiply by ``scale`` and sum over the group: into the shards, or everywhere when there is only one shard.

        Until ``wait_for_grads`` the gradients must not be touched.
        """
        if scale != 1.0:
            self.grads.tensor.mul_(scale)
        if self.group_size == 1:
            return
        if self.num_shards > 1:
            flat, shard = self.grads.tensor, self.grad_shard
            self._grad_work = reduce_scatter_in_place(flat, shard, self.group, async_op=True)
        else:
            self._grad_work = dist.all_reduce(self.grads.tensor, group=self.group, async_op=True)

    def wait_for_grads(self) -> None:
        """Make the device (the host, on CPU) wait for the reduction, if one is under way."""
        if self._grad_work is not None:
            self._grad_work.wait()
            self._grad_work = None

    def start_param_gather(self) -> None:
        """Make all parameters current again after every rank has updated its shard; see ``wait_for_params``."""
        if self.num_shards > 1:
            self._param_work = all_gather_in_place(self.params.tensor, self.param_shard, self.group, async_op=True)

    def wait_for_params(self) -> None:
        """Make the device (the host, on CPU) wait for the gathering, if one is under way."""
        if self._param_work is not None:
            self._param_work.wait()
            self._param_work = None

    def in_shard(self, span: Range) -> Range:
        """The part of ``span`` that lies in the shard, counted from the shard's start; (n, n) when there is none."""
        start, end = self.shard
        low = min(max(span[0], start), end) - start
        return low, max(low, min(span[1], end) - start)


class FrozenParams:
    """Makes ``params`` (of one dtype) views of one flat tensor; the optimizer never sees them."""

    def __init__(self, name: str, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.name = name
        self.param_ranges, numel = assign_ranges(params)
        first = params[0][1]
        self.params = OffloadableTensor(torch.zeros(numel, dtype=first.dtype, device=first.device))
        move_into(self.params.tensor, params, self.param_ranges)


def frozen_params(params: Sequence[tuple[str, nn.Parameter]]) -> list[FrozenParams]:
    """One ``FrozenParams`` for each dtype among those of ``params`` that take no gradient."""
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        if not param.requires_grad:
            by_dtype.setdefault(param.dtype, []).append((name, param))
    return [FrozenParams(f"frozen_{str(dtype).removeprefix('torch.')}", of) for dtype, of in by_dtype.items()]


def _layout_class(name: str, param: nn.Parameter, is_expert: bool) -> int:
    """Position of a parameter's kind in the buffer, 0 to 5; see ``ParamAndGradBuffer``.

    Vectors (norm weights) and biases are not decayed. An expert is never a TP duplicate: the TP ranks split its weight
    (expert TP), hold other experts, or are among its replicas.
    """
    if is_expert or getattr(param, "tensor_model_parallel", False):
        kind = 0
    else:
        kind = 2 if getattr(param, "sequence_parallel", False) else 1
    has_decay = param.dim() > 1 and not name.endswith(".bias")
    return kind if has_decay else 5 - kind


def assign_ranges(params: Sequence[tuple[str, nn.Parameter]]) -> tuple[dict[str, Range], int]:
    """Return the aligned range of each of ``params``, one after another, by name, and the end of the last one."""
    ranges, end = {}, 0
    for name, param in params:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + param.numel()
        ranges[name] = (start, end)
    return ranges, end


def move_into(flat: Tensor, params: Sequence[tuple[str, nn.Parameter]], ranges: Mapping[str, Range]) -> None:
    """Make every parameter, with its values, a view of its range of ``flat``."""
    for name, param in params:
        start, end = ranges[name]
        view = flat[start:end].view(param.shape)
        view.copy_(param.data)
        param.data = view


def _span(ranges: Sequence[Range]) -> Range:
    return (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
