"""Who holds the memory of one rank: every persistent byte of a training engine, and every activation of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.offload import HostTensor, OffloadableTensor
from megatron.core.distributed.param_and_grad_buffer import Range
from megatron.core.models.gpt.model_chunks import make_gpt_model
from megatron.core.ops import reference_ops
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import GROUP_AXES, ProcessGroups
from megatron.core.transformer.transformer_config import TransformerConfig

ON_DEVICE, ON_HOST = "device", "host"


@dataclass(frozen=True)
class LedgerEntry:
    """Bytes that one owner holds in one place.

    owner: name of a parameter, buffer or module, or of the flat buffer whose padding this is · what: parameter,
    gradient, buffer, master, exp_avg, exp_avg_sq, slots (through which CPU Adam copies) or activation; "... copy" for
    what an offload keeps on the host · device: "device" or "host".
    """

    owner: str
    what: str
    device: str
    num_bytes: int


def ledger(model: nn.Module, optimizer: DistributedOptimizer | None = None) -> list[LedgerEntry]:
    """All memory that ``model`` (wrapped or not) and ``optimizer`` hold between steps, as it is now.

    What is offloaded is on the host; what is shared (tied weights) is told once, by its first name.
    """
    entries: list[LedgerEntry] = []
    module, seen = model, set()
    if isinstance(model, DistributedDataParallel):
        for buffer in model.param_and_grad_buffers:
            entries += _flat_entries(buffer.params, "parameter", buffer.name, buffer.param_ranges)
            entries += _flat_entries(buffer.grads, "gradient", buffer.name, buffer.param_ranges)
        for frozen in model.frozen_params:
            entries += _flat_entries(frozen.params, "parameter", frozen.name, frozen.param_ranges)
        module = model.module
        seen = {_storage(param) for param in module.parameters()}
    for what, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            if _storage(tensor) not in seen:
                seen.add(_storage(tensor))
                entries.append(LedgerEntry(name, what, ON_DEVICE, tensor.untyped_storage().nbytes()))
    if optimizer is not None:
        for state in optimizer.shards:
            first = state.buffer.shard[0] + state.start
            for what, item in state.tensors.items():
                entries += _flat_entries(item, what, state.buffer.name, state.buffer.param_ranges, first)
        entries += [
            LedgerEntry(name, "slots", ON_HOST, slots.host_bytes) for name, slots in optimizer.host_slots.items()
        ]
    return entries


def total_bytes(entries: Sequence[LedgerEntry], device: str | None = None, what: str | None = None) -> int:
    """Sum over the entries in one place (None: all) of one kind (None: all)."""
    return sum(
        entry.num_bytes
        for entry in entries
        if (device is None or entry.device == device) and (what is None or entry.what == what)
    )


def table(entries: Sequence[LedgerEntry], depth: int = 3) -> str:
    """Lines "bytes device what owner", largest first; owners are cut after ``depth`` parts of their name."""
    sums: dict[tuple[str, str, str], int] = {}
    for entry in entries:
        key = (entry.device, entry.what, ".".join(entry.owner.split(".")[:depth]))
        sums[key] = sums.get(key, 0) + entry.num_bytes
    lines = [f"{size:>16,} {place:6} {what:18} {owner}" for (place, what, owner), size in sums.items()]
    return "\n".join([*sorted(lines, reverse=True), f"{total_bytes(entries):>16,} in all"])


def _flat_entries(
    item: OffloadableTensor, what: str, name: str, ranges: Mapping[str, Range], first: int = 0
) -> Iterator[LedgerEntry]:
    """A flat tensor by parameter; it holds the elements of ``ranges`` from ``first`` on, and the rest is padding."""
    on_host = what if isinstance(item, HostTensor) else f"{what} copy"
    places = ((ON_DEVICE, what, item.device_bytes), (ON_HOST, on_host, item.host_bytes))
    itemsize, numel = item.tensor.element_size(), item.tensor.numel()
    for place, kind, num_bytes in places:
        if not num_bytes:
            continue
        for owner, (start, stop) in ranges.items():
            low, high = max(start - first, 0), min(stop - first, numel)
            if low < high:
                num_bytes -= (high - low) * itemsize
                yield LedgerEntry(owner, kind, place, (high - low) * itemsize)
        if num_bytes:
            yield LedgerEntry(f"{name} (padding)", kind, place, num_bytes)


def predict_ledger(
    config: TransformerConfig,
    layout: ParallelLayout,
    rank: int,
    ddp_config: DistributedDataParallelConfig | None = None,
    optimizer_config: OptimizerConfig | None = None,
) -> list[LedgerEntry]:
    """The ledger that ``rank`` of ``layout`` will have, without its memory, its processes or its device.

    The same constructors run on the meta device, so nothing is guessed. None: a plain model, without gradients, and
    without an optimizer. Takes about a second for a stage of 671B parameters.
    """
    groups = planned_groups(layout, rank)
    with torch.device("meta"):
        model = make_gpt_model(config, groups, reference_ops())
        if ddp_config is None:
            return ledger(model)
        ddp = DistributedDataParallel(config, ddp_config, model, groups)
        if optimizer_config is None:
            return ledger(ddp)
        return ledger(ddp, get_megatron_optimizer(optimizer_config, ddp, groups, reference_ops()))


def planned_groups(layout: ParallelLayout, rank: int) -> ProcessGroups:
    """Groups that know their size and this rank's place in them, and can do nothing else."""
    axes = {name: layout.members(rank, *of) for name, of in GROUP_AXES.items()}
    groups = {name: _planned_group(members.index(rank), len(members)) for name, members in axes.items()}
    world = _planned_group(rank, layout.world_size)
    return ProcessGroups(layout=layout, rank=rank, coords=layout.coords(rank), world=world, **groups)


def _planned_group(rank: int, size: int) -> dist.ProcessGroup:
    return dist.ProcessGroup(rank, size)  # type: ignore[call-arg]  # the constructor without a store is not in the stubs


def activation_ledger(model: nn.Module, forward: Callable[[], Any]) -> tuple[Any, list[LedgerEntry]]:
    """Result of ``forward()``, and all memory that it made and that is still held, by the module that made it.

    That is what autograd keeps for the backward, what recomputation keeps to run again, and the result itself.
    """
    path = [""]
    with _names_of_running_modules(model, path), _Allocations(path) as allocations:
        result = forward()
    return result, [
        LedgerEntry(owner, "activation", ON_DEVICE, num_bytes) for owner, num_bytes in allocations.held() if num_bytes
    ]


class _Allocations(TorchDispatchMode):
    """Remembers, without keeping it alive, every storage that an operation returns, and which module was running."""

    def __init__(self, path: Sequence[str]) -> None:
        super().__init__()
        self._path = path
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            if isinstance(x, torch.Tensor) and _storage(x) not in inputs:
                self._made[_storage(x)] = (StorageWeakRef(x.untyped_storage()), self._path[-1])
        return outputs

    def held(self) -> Iterator[tuple[str, int]]:
        """Owner and present size of each storage that somebody still holds."""
        for reference, owner in self._made.values():
            if not reference.expired():
                yield owner, torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()  # type: ignore[attr-defined]


@contextmanager
def _names_of_running_modules(model: nn.Module, path: list[str]) -> Iterator[None]:
    """Inside, the last element of ``path`` is the name of the innermost module whose forward is running."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)))
        handles.append(module.register_forward_hook(lambda *_: _drop(path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop(path: list[str]) -> None:
    path.pop()


def _storage(tensor: torch.Tensor) -> int:
    """Names the storage that ``tensor`` lies in, also when that has no memory (offloaded, meta)."""
    return int(tensor.untyped_storage()._cdata)
