"""A device with sizes and no values, which counts its memory in use, the peak, and the collectives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from megatron.core.parallel_state import PAIR
from tools.plan._compat import let_recompute_run_on_meta
from tools.plan.collectives import POINT_TO_POINT, Collective, CollectiveLog, describe, done_work, returned
from tools.plan.known_outputs import KnownOutputs
from tools.plan.launches import LAUNCH, is_launch

DEVICE = torch.device("meta")
_COPY, _MOVE = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
_TO_SCALAR, _IS_PINNED = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_pinned.default
_SPECIAL = {_COPY, _MOVE, _TO_SCALAR, _IS_PINNED}
_AS_USUAL = object()


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes while the meter runs, until the storage is freed.

    Storages that were there before do not count. On a real device the caller's host tensors count too; they are small.
    ``total_bytes`` is the sum of all storages, as if nothing were freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0
        self.peak_bytes = 0
        self.total_bytes = 0
        self._alive: dict[int, weakref.ref] = {}
        self._sizes: dict[int, int] = {}
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        outputs = func(*args, **(kwargs or {}))
        self.count(func, outputs)
        return outputs

    def count(self, func: Any, outputs: Any) -> None:
        """Note the storages of ``outputs`` that are new; what ``func`` writes into or views was there before."""
        if self._is_paused or func.namespace == "c10d" or _is_view_or_write(func):
            return
        if isinstance(outputs, torch.Tensor):
            self._count(outputs.untyped_storage())
            return
        for x in tree_iter(outputs):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())

    def settle(self) -> None:
        """Count storages again that were resized in place, as offloading does: no operation reports that."""
        for key, reference in self._alive.items():
            storage = reference()
            if storage is not None and storage.nbytes() != self._sizes[key]:
                self.add(storage.nbytes() - self._sizes[key])
                self._sizes[key] = storage.nbytes()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the storages that are made inside."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        num_bytes = storage.nbytes()
        if key in self._alive or not num_bytes:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key))
        self._sizes[key] = num_bytes
        self.add(num_bytes)

    def add(self, num_bytes: int) -> None:
        """Count so many bytes more."""
        self.now_bytes += num_bytes
        self.total_bytes += max(num_bytes, 0)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _free(self, key: int) -> None:
        del self._alive[key]
        self.now_bytes -= self._sizes.pop(key)


class PlannedDevice(TorchDispatchMode):
    """Makes the code of a run work on the meta device, which holds shapes only.

    Collectives are noted in ``log`` and move nothing. Pinned host memory is meta memory too, counted apart; where host
    and device are one (``has_host_memory`` False) it is memory like any other, and what is sent to the device is there
    already. What the host reads of the device is zero: a value that steers the program (how many tokens went to which
    expert, which token was sampled) must come from an op table made for plans.
    """

    def __init__(
        self,
        log: CollectiveLog,
        meter: MemoryMeter,
        has_host_memory: bool = True,
        buffer_bytes: Callable[[str], int] | None = None,
    ) -> None:
        """buffer_bytes: memory of a communicator by the name of its group, ``PAIR`` for one of two ranks alone."""
        super().__init__()
        let_recompute_run_on_meta()
        self.log, self.meter, self.has_host_memory = log, meter, has_host_memory
        self._buffer_bytes = buffer_bytes or (lambda group: 0)
        self._communicators: set[tuple[str, tuple[int, ...], int]] = set()
        self.communicator_bytes = 0
        self.launches = 0  # since the start
        self._known = KnownOutputs()  # a rank's own: what the first call makes on the way counts in every plan
        self._host: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # pinned

    def move_to_host(self, num_bytes: int) -> None:
        """Count so many bytes of the device as memory of its host from now on."""
        if self.has_host_memory:
            self.meter.now_bytes -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is LAUNCH:
            self.launches += args[0]
            return None
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if is_launch(func) and _is_on_device(args, kwargs):
            self.launches += 1
        if kwargs.get("pin_memory"):
            return self._pinned(func, args, kwargs)
        if func in _SPECIAL and (result := self._special(func, args, kwargs)) is not _AS_USUAL:
            return result
        if _is_mixed(args, kwargs):
            args, kwargs = _on_meta((args, kwargs))
        outputs = func(*args, **kwargs) if _is_view(func) else self._known.of(func, args, kwargs)
        self.meter.count(func, outputs)
        return outputs

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = describe(func, args)
        self.log.note(call)
        self.launches += 1
        self.connect(call)
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_iter(list(args))):
            return returned(func, args, done_work(args))
        return func(*args, **kwargs)

    @contextmanager
    def launches_apart(self) -> Iterator[None]:
        """Do not count the launches inside."""
        before = self.launches
        try:
            yield
        finally:
            self.launches = before

    def connect(self, call: Collective) -> None:
        """Count the buffers of the call's communicator, which the first call makes and which stay."""
        if len(call.ranks) == 1:
            return
        is_pair = call.kind in POINT_TO_POINT
        key = (call.group, call.ranks, call.peer)
        if key not in self._communicators:
            self._communicators.add(key)
            num_bytes = self._buffer_bytes(PAIR if is_pair else call.group)
            self.communicator_bytes += num_bytes
            self.meter.add(num_bytes)

    def _pinned(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        planned: torch.Tensor = func(*args, **(kwargs | {"pin_memory": False, "device": DEVICE}))
        if self.has_host_memory:
            self._host.add(planned.untyped_storage())
        else:
            self.meter.count(func, planned)
        return planned

    def _special(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that reads, moves or asks about a device tensor, or ``_AS_USUAL``."""
        x = args[0]
        if func is _COPY:
            return x if x.is_meta or args[1].is_meta else _AS_USUAL
        if func is _IS_PINNED:
            return x.untyped_storage() in self._host if x.is_meta else _AS_USUAL
        if func is _TO_SCALAR:
            return torch.zeros((), dtype=x.dtype).item() if x.is_meta else _AS_USUAL
        device, dtype = kwargs.get("device"), kwargs.get("dtype") or x.dtype
        if device is None or torch.device(device) == x.device:
            return _AS_USUAL
        if x.is_meta:
            return torch.zeros(x.shape, dtype=dtype)
        is_copied = self.has_host_memory or dtype != x.dtype
        return _AS_USUAL if is_copied else func(*args, **kwargs)


@cache
def _is_view_or_write(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


@cache
def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


@cache
def _is_composite(func: Any) -> bool:
    """Whether torch makes it of other operations, which inference mode would hide."""
    if func.namespace == "prim":  # questions about a tensor
        return False
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _is_mixed(args: Any, kwargs: Any) -> bool:
    """Whether there are host and device tensors among the arguments; asked of every operation, so without pytrees."""
    kinds = 0
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, torch.Tensor):
            kinds |= 1 if x.is_meta else 2
        elif isinstance(x, (list, tuple)):
            for part in x:
                if isinstance(part, torch.Tensor):
                    kinds |= 1 if part.is_meta else 2
    return kinds == 3


def _is_on_device(args: Any, kwargs: Any) -> bool:
    """Whether there is a device tensor among the arguments, or one is to be made."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == DEVICE.type
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            if x.is_meta:
                return True
        elif isinstance(x, (list, tuple)) and any(isinstance(part, torch.Tensor) and part.is_meta for part in x):
            return True
    return False


def _on_meta(args: Any) -> Any:
    """Move host tensors among device tensors to the meta device: the result has no values anyway."""
    return tree_map_only(torch.Tensor, lambda x: x if x.is_meta else torch.empty_like(x, device=DEVICE), args)
