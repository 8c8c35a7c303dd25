"""The collectives of one rank in order, recorded while it runs or while it is planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    the group ("ep", "tp_dp_cp", "rollout_tp", ...) · ranks: its members, global · dtype: as torch prints it · sent,
    received: numbers of elements · splits: rows to and from each member in an all-to-all with uneven parts, else None ·
    peer: global rank of the other side of a send or recv, else -1.
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
        dtype: torch.dtype = getattr(torch, self.dtype)
        return max(self.sent, self.received) * dtype.itemsize

    def __str__(self) -> str:
        where = f"rank {self.peer}" if self.peer >= 0 else f"{len(self.ranks)} ranks of {self.group}"
        return f"{self.kind} of {max(self.sent, self.received):,} {self.dtype} with {where}"


class CollectiveLog(TorchDispatchMode):
    """Records the collectives of this rank in order while it is active; they run as they would without it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self._is_paused = False

    def note(self, call: Collective) -> None:
        if not self._is_paused:
            self.calls.append(call)

    @contextmanager
    def apart(self) -> Iterator[list[Collective]]:
        """Record the calls inside in the list that this yields only."""
        before, self.calls = self.calls, []
        try:
            yield self.calls
        finally:
            self.calls = before

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
            self.note(describe(func, args))
        return func(*args, **(kwargs or {}))


def describe(func: Any, args: Sequence[Any]) -> Collective:
    """The call that torch dispatches; ``NotImplementedError`` for an operator that nothing here uses."""
    name = func._schema.name
    if name not in _KINDS:
        raise NotImplementedError(f"{name} is a collective that plans do not know; add it to {__name__}")
    kind, sent_at, received_at = _KINDS[name]
    group = next(dist.ProcessGroup.unbox(x) for x in args if _is_group(x))
    if group not in _RANKS:
        _RANKS[group] = tuple(dist.get_process_group_ranks(group))
    ranks = _RANKS[group]
    sent = [] if sent_at is None else tree_leaves(args[sent_at])
    received = [] if received_at is None else tree_leaves(args[received_at])
    splits = None
    if kind == "all_to_all" and args[3]:
        splits = (tuple(args[4]), tuple(args[3]))
    peer = ranks[args[2]] if kind in POINT_TO_POINT else -1
    purpose = "world" if group.group_desc == "default_pg" else group.group_desc
    dtype = str((sent or received or [torch.empty(0)])[0].dtype).removeprefix("torch.")
    num_sent, num_received = (sum(x.numel() for x in tensors) for tensors in (sent, received))
    return Collective(kind, purpose, ranks, dtype, num_sent, num_received, splits, peer)


def returned(func: Any, args: Sequence[Any], work: Any) -> Any:
    """What ``func`` returns when its work is ``work``."""
    return work if func._schema.name in _WORK_ALONE else (args[0], work)


def done_work(args: Sequence[Any]) -> Any:
    """A work that has ended, as the planned group of the operation with ``args`` gives it for a barrier on the host."""
    group = next(filter(_is_group, args))
    return torch.ops.c10d.barrier(torch.empty(1), group, [], timeout=-1)


def _is_group(x: Any) -> bool:
    return isinstance(x, torch.ScriptObject) and x._type().qualified_name().endswith("c10d.ProcessGroup")
