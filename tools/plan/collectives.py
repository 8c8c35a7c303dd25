"""The collectives of one rank in order, recorded while it runs or while it is planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

POINT_TO_POINT = ("send", "recv")
# torch's operator -> (our name, arguments that are sent, arguments that are received into)
_KINDS = {
    "c10d::allreduce_": ("all_reduce", 0, 0),
    "c10d::broadcast_": ("broadcast", 0, 0),
    "c10d::allgather_": ("all_gather", 1, 0),
    "c10d::_allgather_base_": ("all_gather", 1, 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 0),
    "c10d::alltoall_base_": ("all_to_all", 1, 0),
    "c10d::send": ("send", 0, None),
    "c10d::recv_": ("recv", None, 0),
    "c10d::barrier": ("barrier", None, None),
}
_RANKS: WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()  # global ranks of known groups
_WORK_ALONE = ("c10d::alltoall_base_", "c10d::send", "c10d::recv_", "c10d::barrier")


class Collective(NamedTuple):
    """One call of one rank.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, barrier, send or recv · group: the purpose of
    the group ("ep", "tp_dp_cp", ...) · ranks: its members, global · dtype: as torch prints it · sent, received: numbers
    of elements · splits: rows to and from each member in an all-to-all with uneven parts, else None · peer: global rank
    of the other side of a send or recv, else -1.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    dtype: str
    sent: int
    received: int
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None
    peer: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the larger side, in this rank's memory."""
        return max(self.sent, self.received) * _itemsize(self.dtype)

    def __str__(self) -> str:
        where = f"rank {self.peer}" if self.peer >= 0 else f"{len(self.ranks)} ranks of {self.group}"
        return f"{self.kind} of {max(self.sent, self.received):,} {self.dtype} with {where}"


@dataclass(frozen=True)
class Phase:
    """A rank's calls in one phase of a step, in order."""

    name: str
    calls: tuple[Collective, ...]


class CollectiveLog(TorchDispatchMode):
    """Records the collectives of this rank while it is active, by phase; they run as they would without it."""

    def __init__(self) -> None:
        super().__init__()
        self._phases: list[tuple[str, list[Collective]]] = [("", [])]
        self._is_paused = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the calls inside as phase ``name``; phases do not nest."""
        self._phases.append((name, []))
        try:
            yield
        finally:
            self._phases.append(("", []))

    @property
    def phases(self) -> list[Phase]:
        """All phases with calls, in order; calls outside of every phase have the name ""."""
        return [Phase(name, tuple(calls)) for name, calls in self._phases if calls]

    def add(self, func: Any, args: Sequence[Any]) -> None:
        """Record a call of one of torch's collective operators."""
        self.note(describe(func, args))

    def note(self, call: Collective) -> None:
        """Record a call that is none of torch's."""
        if not self._is_paused:
            self._phases[-1][1].append(call)

    @contextmanager
    def apart(self) -> Iterator[list[Collective]]:
        """Record the calls inside in the list that this yields, and in no phase."""
        calls: list[Collective] = []
        before, self._phases = self._phases, [("", calls)]
        try:
            yield calls
        finally:
            self._phases = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record the calls inside."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.add(func, args)
        return func(*args, **(kwargs or {}))


def describe(func: Any, args: Sequence[Any]) -> Collective:
    """The call that torch dispatches; ``NotImplementedError`` for an operator that nothing here uses."""
    name = func._schema.name
    if name not in _KINDS:
        raise NotImplementedError(f"{name} is a collective that plans do not know; add it to {__name__}")
    kind, sent_at, received_at = _KINDS[name]
    group = next(dist.ProcessGroup.unbox(x) for x in args if _is_group(x))
    ranks = _ranks(group)
    sent = [] if sent_at is None else _tensors(args[sent_at])
    received = [] if received_at is None else _tensors(args[received_at])
    splits = None
    if kind == "all_to_all" and args[3]:
        splits = (tuple(args[4]), tuple(args[3]))
    peer = ranks[args[2]] if kind in POINT_TO_POINT else -1
    dtype = str((sent or received or [torch.empty(0)])[0].dtype).removeprefix("torch.")
    num_sent, num_received = (sum(x.numel() for x in tensors) for tensors in (sent, received))
    return Collective(kind, _purpose(group), ranks, dtype, num_sent, num_received, splits, peer)


def returned(func: Any, args: Sequence[Any], work: Any) -> Any:
    """What ``func`` returns when its work is ``work``."""
    return work if func._schema.name in _WORK_ALONE else (args[0], work)


def _is_group(x: Any) -> bool:
    return isinstance(x, torch.ScriptObject) and x._type().qualified_name().endswith("c10d.ProcessGroup")


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    known: tuple[int, ...] | None = _RANKS.get(group)
    if known is None:
        known = _RANKS[group] = tuple(dist.get_process_group_ranks(group))
    return known


def _purpose(group: dist.ProcessGroup) -> str:
    purpose = group.group_desc
    return {"default_pg": "world", "undefined": "engine"}.get(purpose, purpose)


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return [tensor for part in x for tensor in _tensors(part)]


@cache
def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size
