"""The process groups of one job: every rank builds them once, in the same order, and passes them on as one object."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.parallel_layout import ParallelLayout, RankCoords


@dataclass(frozen=True)
class ProcessGroups:
    """Every group this rank is a member of; all are real groups, also those of size 1. Members are in rank order.

    Dense weights. tp: ranks that share one weight · cp: ranks that share the sequences of one micro-batch · dp:
    replicas with other sequences · dp_cp: all replicas, over which gradients are summed · pp: the stages of one
    replica, first stage first · mp: all ranks of one replica (TP x PP) · tp_cp: ranks that share the tokens of one
    micro-batch · tp_dp_cp: ranks of one stage, which share all tokens.
    Experts. ep: ranks that share the experts of a layer · etp: ranks that share one expert's weights · etp_ep: both ·
    edp: replicas of an expert.
    world: all ranks that train.
    """

    layout: ParallelLayout
    rank: int
    coords: RankCoords
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    mp: dist.ProcessGroup
    tp_cp: dist.ProcessGroup
    tp_dp_cp: dist.ProcessGroup
    ep: dist.ProcessGroup
    etp: dist.ProcessGroup
    etp_ep: dist.ProcessGroup
    edp: dist.ProcessGroup
    world: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coords.pp == self.layout.pipeline_model_parallel_size - 1


# Group -> (axes in which its members differ, whether these are axes of the expert grid).
GROUP_AXES: dict[str, tuple[tuple[str, ...], bool]] = {
    "tp": (("tp",), False),
    "cp": (("cp",), False),
    "dp": (("dp",), False),
    "dp_cp": (("dp", "cp"), False),
    "pp": (("pp",), False),
    "mp": (("tp", "pp"), False),
    "tp_cp": (("tp", "cp"), False),
    "tp_dp_cp": (("tp", "dp", "cp"), False),
    "ep": (("ep",), True),
    "etp": (("tp",), True),
    "etp_ep": (("tp", "ep"), True),
    "edp": (("dp",), True),
}

PAIR = "pair"  # in place of a group's name: two ranks, between which ``isend`` and ``irecv`` go
# What nothing is sent over, by ``moe_token_dispatcher_type``.
UNUSED_GROUPS = {"alltoall": ("mp", "etp_ep"), "allgather": ("mp", "ep", "etp"), "flex": ("mp", "etp_ep")}


class GroupBackend:
    """What the groups ask of torch.distributed's backend: here nothing; a kind of device derives its own from it."""

    def options(self, group: str) -> Any:
        """Return the backend's options of the groups called ``group``, a field of ``ProcessGroups``, or None."""
        return None

    def buffer_bytes(self, group: str) -> int:
        """Return the device memory that such a group's communicator takes beside torch's allocator, once it is used.

        ``PAIR`` stands for a communicator of two ranks, where a backend makes one for each pair.
        """
        return 0


# Set by initialize_model_parallel, cleared by destroy_model_parallel.
_GROUPS: ProcessGroups | None = None
# Before torch 2.8 a group that is freed right after its last collective may wait for ever for its own thread, which
# still frees the tensors and wants the interpreter for that (pytorch #56297). So the last groups live a while longer.
_DESTROYED: ProcessGroups | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    distributed_timeout_minutes: float = 30,
    **layout: Any,
) -> ProcessGroups:
    """``initialize_from_layout`` with upstream's arguments; every rank must call it with the same ones.

    ``layout`` are the other fields of ``ParallelLayout``. The backend is the world's.
    """
    layout["virtual_pipeline_model_parallel_size"] = virtual_pipeline_model_parallel_size or 1
    sizes = _world_size(), tensor_model_parallel_size, pipeline_model_parallel_size
    return initialize_from_layout(ParallelLayout(*sizes, **layout), distributed_timeout_minutes)


def initialize_from_layout(
    layout: ParallelLayout,
    distributed_timeout_minutes: float = 30,
    *,
    num_other_ranks: int = 0,
    backend: GroupBackend | None = None,
) -> ProcessGroups:
    """Make all groups of the job on an initialised ``torch.distributed``; every rank calls it with the same layout.

    The last ``num_other_ranks`` ranks do something else and do not call it. Raises ``ValueError`` with every problem of
    the layout.
    """
    global _GROUPS
    if _GROUPS is not None:
        raise RuntimeError("model parallel groups exist already; call destroy_model_parallel() first")
    problems = layout.problems()
    if layout.world_size + num_other_ranks != _world_size():
        others = f" and {num_other_ranks} others" if num_other_ranks else ""
        problems.append(f"the layout is for {layout.world_size} ranks{others}; torch.distributed has {_world_size()}")
    if problems:
        raise ValueError("parallel layout: " + "; ".join(problems))
    rank, timeout = dist.get_rank(), timedelta(minutes=distributed_timeout_minutes)
    backend = backend or GroupBackend()
    mine: dict[str, dist.ProcessGroup] = {}
    for name in GROUP_AXES:
        for ranks in group_ranks(layout, name):
            # new_group is collective over the world: ranks outside of a group must reach the call too, in this order.
            # Where some ranks do not train, it is collective over the members alone.
            if not num_other_ranks or rank in ranks:
                group = dist.new_group(
                    ranks,
                    timeout=timeout,
                    pg_options=backend.options(name),
                    group_desc=name,
                    use_local_synchronization=num_other_ranks > 0,
                )
            if rank in ranks:
                mine[name] = group
    world = dist.group.WORLD
    if num_other_ranks:
        everybody = list(range(layout.world_size))
        world = dist.new_group(everybody, timeout=timeout, group_desc="world", use_local_synchronization=True)
    assert world is not None, "checked by _world_size"
    _GROUPS = ProcessGroups(layout=layout, rank=rank, coords=layout.coords(rank), world=world, **mine)
    return _GROUPS


def connect(groups: ProcessGroups, device: torch.device, unused: Collection[str] = ()) -> list[str]:
    """Make the communicators of the groups of several ranks but the ``unused`` ones, and return their names.

    Backends make a communicator and its buffers at a group's first collective; here it comes before anyone measures
    how much of the device is free. Every rank of ``groups.world`` calls it.
    """
    used = [name for name in (*GROUP_AXES, "world") if name not in unused and getattr(groups, name).size() > 1]
    for name in used:
        dist.all_reduce(torch.zeros(1, device=device), group=getattr(groups, name))
    return used


def _world_size() -> int:
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    return dist.get_world_size()


def group_ranks(layout: ParallelLayout, name: str) -> list[list[int]]:
    """Global ranks of every group of that name (a field of ``ProcessGroups``), ordered by their lowest member."""
    axes, is_expert = GROUP_AXES[name]
    found: list[list[int]] = []
    seen = bytearray(layout.world_size)
    for rank in range(layout.world_size):
        if not seen[rank]:
            found.append(layout.members(rank, axes, is_expert))
            for member in found[-1]:
                seen[member] = 1
    return found


def destroy_model_parallel() -> None:
    """Forget the groups, whose connections the next call frees; does nothing when there are none."""
    global _GROUPS, _DESTROYED
    if _GROUPS is None:
        return
    for name in GROUP_AXES:
        dist.destroy_process_group(getattr(_GROUPS, name))
    if _GROUPS.world is not dist.group.WORLD:
        dist.destroy_process_group(_GROUPS.world)
    _DESTROYED, _GROUPS = _GROUPS, None
