"""A world of ranks of which only one exists: real process groups that send nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import GROUP_AXES, ProcessGroups
from tools.launch.ray_node import npu_variables
from tools.plan._compat import fake_process_group

BACKEND = "planned"
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@contextmanager
def planned_rank(
    rank: int, world_size: int, ranks_per_node: int, variables: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``world_size`` to torch.distributed and to the environment, which has
    ``variables`` too: those that the launcher gives a run.

    Groups are made and used as usual, and their collectives move nothing: tensors on meta have no values, and
    a host tensor is gathered as if every rank had sent the same, which holds for everything that ranks agree on.
    """
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _new_backend, devices=["cpu", "meta"])
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised already; a plan needs a process of its own")
    local_rank, num_local = rank % ranks_per_node, min(ranks_per_node, world_size)
    values = (rank, world_size, local_rank, num_local, "127.0.0.1")
    given = {name: str(value) for name, value in zip(_ENVIRONMENT, values, strict=True)} | dict(variables or {})
    with environment_of(given):
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def environment_of(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process's environment has ``variables``, too."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


@cache
def run_variables(family: str) -> Mapping[str, str]:
    """The variables that the launcher gives a run on devices of this family, where they matter to its plan."""
    return npu_variables(os.environ) if family == "ascend" else {}


def own_groups(layout: ParallelLayout, rank: int) -> ProcessGroups:
    """The groups that ``rank`` is in, as ``initialize_from_layout`` makes them, without those of all the others."""
    groups = {
        name: dist.new_group(layout.members(rank, *of), group_desc=name, use_local_synchronization=True)
        for name, of in GROUP_AXES.items()
    }
    world = dist.group.WORLD
    if layout.world_size < dist.get_world_size():
        world = dist.new_group(list(range(layout.world_size)), group_desc="world", use_local_synchronization=True)
    assert world is not None, "inside planned_rank"
    return ProcessGroups(layout=layout, rank=rank, coords=layout.coords(rank), world=world, **groups)


def _new_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return fake_process_group(rank, size)
