"""The process groups of one job: built once by every rank, in the same order, and handed on as one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.core.parallel_layout import ParallelLayout, RankCoords


@dataclass(frozen=True)
class ProcessGroups:
    """Every group this rank is a member of; all are real groups, also those of size 1.

    tp: ranks that share one dense weight · pp: the stages of one replica, first stage first · dp: replicas of a dense
    weight · ep: ranks that share the experts of a layer · edp: replicas of an expert · mp: all ranks of one dense
    replica (TP x PP) · world: everybody.
    """

    layout: ParallelLayout
    rank: int
    coords: RankCoords
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    ep: dist.ProcessGroup
    edp: dist.ProcessGroup
    mp: dist.ProcessGroup
    world: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.coords.pp == self.layout.pipeline_model_parallel_size - 1


# Ranks with equal keys form one group; members are in rank order, which is also the order of the axis coordinate.
_GROUP_KEYS: dict[str, Callable[[RankCoords], tuple[int, ...]]] = {
    "tp": lambda c: (c.pp, c.dp, c.cp),
    "pp": lambda c: (c.tp, c.dp, c.cp),
    "dp": lambda c: (c.tp, c.pp, c.cp),
    "ep": lambda c: (c.pp, c.edp, c.etp),
    "edp": lambda c: (c.pp, c.ep, c.etp),
    "mp": lambda c: (c.dp, c.cp),
}

# The one object behind the upstream getters: set by initialize_model_parallel, cleared by destroy_model_parallel.
_GROUPS: ProcessGroups | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
    num_layer_list: tuple[int, ...] | None = None,
) -> ProcessGroups:
    """Make all groups of the job on an initialised ``torch.distributed``; every rank must call it with the same sizes.

    ``expert_tensor_parallel_size=None`` means 1. The backend is the world's. Raises ``ValueError`` with every
    problem of the layout.
    """
    global _GROUPS
    if _GROUPS is not None:
        raise RuntimeError("model parallel groups exist already; call destroy_model_parallel() first")
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    layout = ParallelLayout(
        world_size=dist.get_world_size(),
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=1 if expert_tensor_parallel_size is None else expert_tensor_parallel_size,
        num_layer_list=num_layer_list,
    )
    problems = layout.problems()
    if virtual_pipeline_model_parallel_size not in (None, 1):
        problems.append(
            f"virtual_pipeline_model_parallel_size is {virtual_pipeline_model_parallel_size}; only None is supported"
        )
    if order != "tp-cp-ep-dp-pp":
        problems.append(f"order is {order!r}; only 'tp-cp-ep-dp-pp' is supported")
    if num_layer_list is not None and len(num_layer_list) != pipeline_model_parallel_size:
        problems.append(f"num_layer_list has {len(num_layer_list)} stages; PP is {pipeline_model_parallel_size}")
    if problems:
        raise ValueError("parallel layout: " + "; ".join(problems))
    _GROUPS = _build_groups(layout, dist.get_rank(), timedelta(minutes=distributed_timeout_minutes))
    return _GROUPS


def group_ranks(layout: ParallelLayout, axis: str) -> list[list[int]]:
    """Global ranks of every group of ``axis`` (tp, pp, dp, ep, edp, mp), in the order in which the groups are made."""
    key = _GROUP_KEYS[axis]
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        members.setdefault(key(layout.coords(rank)), []).append(rank)
    return list(members.values())


def _build_groups(layout: ParallelLayout, rank: int, timeout: timedelta) -> ProcessGroups:
    mine: dict[str, dist.ProcessGroup] = {}
    for axis in _GROUP_KEYS:
        for ranks in group_ranks(layout, axis):
            # Collective over the world: also the ranks outside a group must reach the call, in this order.
            group = dist.new_group(ranks, timeout=timeout, group_desc=axis)
            if rank in ranks:
                mine[axis] = group
    world = dist.group.WORLD
    assert world is not None, "checked by initialize_model_parallel"
    return ProcessGroups(layout=layout, rank=rank, coords=layout.coords(rank), world=world, **mine)


def destroy_model_parallel() -> None:
    """Forget the groups and free their connections; does nothing when there are none."""
    global _GROUPS
    if _GROUPS is None:
        return
    for axis in _GROUP_KEYS:
        dist.destroy_process_group(getattr(_GROUPS, axis))
    _GROUPS = None


def get_process_groups() -> ProcessGroups:
    """The object that ``initialize_model_parallel`` returned."""
    if _GROUPS is None:
        raise RuntimeError("model parallel groups do not exist; call initialize_model_parallel first")
    return _GROUPS


def model_parallel_is_initialized() -> bool:
    """Whether ``initialize_model_parallel`` has run."""
    return _GROUPS is not None


is_initialized = model_parallel_is_initialized


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """Ranks that share one dense weight."""
    return get_process_groups().tp


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """Stages of one replica, first stage first."""
    return get_process_groups().pp


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """Replicas of a dense weight (the context-parallel size is 1, so the flag changes nothing)."""
    return get_process_groups().dp


def get_expert_model_parallel_group() -> dist.ProcessGroup:
    """Ranks that share the experts of a layer."""
    return get_process_groups().ep


def get_expert_data_parallel_group() -> dist.ProcessGroup:
    """Replicas of an expert."""
    return get_process_groups().edp


def get_model_parallel_group() -> dist.ProcessGroup:
    """All ranks of one dense replica, TP x PP."""
    return get_process_groups().mp


def get_tensor_model_parallel_world_size() -> int:
    """TP size."""
    return get_process_groups().layout.tensor_model_parallel_size


def get_tensor_model_parallel_rank() -> int:
    """TP coordinate of this rank."""
    return get_process_groups().coords.tp


def get_pipeline_model_parallel_world_size() -> int:
    """PP size."""
    return get_process_groups().layout.pipeline_model_parallel_size


def get_pipeline_model_parallel_rank() -> int:
    """Stage of this rank."""
    return get_process_groups().coords.pp


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """DP size."""
    return get_process_groups().layout.data_parallel_size


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """DP coordinate of this rank."""
    return get_process_groups().coords.dp


def get_context_parallel_world_size() -> int:
    """CP size."""
    return get_process_groups().layout.context_parallel_size


def get_context_parallel_rank() -> int:
    """CP coordinate of this rank."""
    return get_process_groups().coords.cp


def get_expert_model_parallel_world_size() -> int:
    """EP size."""
    return get_process_groups().layout.expert_model_parallel_size


def get_expert_model_parallel_rank() -> int:
    """EP coordinate of this rank."""
    return get_process_groups().coords.ep


def get_expert_tensor_parallel_world_size() -> int:
    """ETP size."""
    return get_process_groups().layout.expert_tensor_parallel_size


def get_expert_tensor_parallel_rank() -> int:
    """ETP coordinate of this rank."""
    return get_process_groups().coords.etp


def get_expert_data_parallel_world_size() -> int:
    """EDP size."""
    return get_process_groups().layout.expert_data_parallel_size


def get_expert_data_parallel_rank() -> int:
    """EDP coordinate of this rank."""
    return get_process_groups().coords.edp


def is_pipeline_first_stage(ignore_virtual: bool = True) -> bool:
    """Whether this rank is on the first stage."""
    return get_process_groups().is_first_stage


def is_pipeline_last_stage(ignore_virtual: bool = True) -> bool:
    """Whether this rank is on the last stage."""
    return get_process_groups().is_last_stage


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage (wraps around)."""
    groups = get_process_groups()
    return dist.get_global_rank(groups.pp, (groups.coords.pp + 1) % groups.layout.pipeline_model_parallel_size)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage (wraps around)."""
    groups = get_process_groups()
    return dist.get_global_rank(groups.pp, (groups.coords.pp - 1) % groups.layout.pipeline_model_parallel_size)


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of the TP group."""
    return dist.get_global_rank(get_process_groups().tp, 0)
