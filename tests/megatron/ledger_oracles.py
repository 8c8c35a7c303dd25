"""Oracles for the memory tests: the ledger that a rank will have, and the activations that a forward keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.memory_ledger import ON_DEVICE, LedgerEntry, ledger
from megatron.core.models.gpt.gpt_model import make_gpt_model
from megatron.core.ops import reference_ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import GROUP_AXES, ProcessGroups
from megatron.core.transformer.transformer_config import TransformerConfig


def predict_ledger(
    config: TransformerConfig,
    layout: ParallelLayout,
    rank: int,
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig,
) -> list[LedgerEntry]:
    """Return the ledger that ``rank`` of ``layout`` will have: the same constructors run on the meta device."""
    groups = planned_groups(layout, rank)
    with torch.device("meta"):
        ddp = DistributedDataParallel(config, ddp_config, make_gpt_model(config, groups, reference_ops()), groups)
        return ledger(ddp, get_megatron_optimizer(optimizer_config, ddp, groups, reference_ops()))


def planned_groups(layout: ParallelLayout, rank: int) -> ProcessGroups:
    """Return groups that know their size and this rank's index in them, and can do nothing else."""
    axes = {name: layout.members(rank, *of) for name, of in GROUP_AXES.items()}
    groups = {name: _planned_group(members.index(rank), len(members)) for name, members in axes.items()}
    world = _planned_group(rank, layout.world_size)
    return ProcessGroups(layout=layout, rank=rank, coords=layout.coords(rank), world=world, **groups)


def _planned_group(rank: int, size: int) -> dist.ProcessGroup:
    return dist.ProcessGroup(rank, size)  # type: ignore[call-arg]  # the constructor without a store is not in the stubs


def activation_ledger(model: nn.Module, forward: Callable[[], Any]) -> tuple[Any, list[LedgerEntry]]:
    """Return the result of ``forward()`` and all memory that it made and still holds, by the module that made it.

    This is what autograd saves for the backward, what recomputation keeps to run again, and the result itself.
    """
    path = [""]
    with _names_of_running_modules(model, path), _Allocations(path) as allocations:
        result = forward()
    return result, [
        LedgerEntry(owner, "activation", ON_DEVICE, num_bytes) for owner, num_bytes in allocations.held() if num_bytes
    ]


class _Allocations(TorchDispatchMode):
    """Record every storage that an operation returns and the module that was running, without keeping it alive."""

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
        """Yield the owner and the present size of each storage that is still held."""
        for reference, owner in self._made.values():
            if not reference.expired():
                yield owner, torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()  # type: ignore[attr-defined]


@contextmanager
def _names_of_running_modules(model: nn.Module, path: list[str]) -> Iterator[None]:
    """Keep the name of the innermost module whose forward is running as the last element of ``path``."""
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
    return int(tensor.untyped_storage()._cdata)
