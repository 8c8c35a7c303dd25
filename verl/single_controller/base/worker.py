"""Base of the classes that run as one process per device."""

from __future__ import annotations

import os

import torch

from hf_formats.cores import threads_per_worker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.utils.timeline import ClockReading, Recording, Timeline, read_clock


class Worker:
    """One rank of a worker group (upstream: ``verl.single_controller.base.Worker``).

    The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT before it builds the worker; a
    missing one is a ValueError. A worker knows nothing of the launcher, so torchrun serves as well.

    Attributes:
        local_rank: the index of this worker among those of its node, which is also its device index.
    """

    def __init__(self) -> None:
        # By itself torch takes no more threads than there are cores, whatever the variable says.
        torch.set_num_threads(threads_per_worker(int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        self._rank, self._world_size, self.local_rank = map(_int_env, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        self._meshes: dict[str, tuple[int, bool]] = {}
        self.timeline = Timeline()

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def rank(self) -> int:
        return self._rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def num_threads(self) -> int:
        """The threads that share one operation of torch on rank 0."""
        return torch.get_num_threads()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_timeline(self) -> ClockReading:
        return self.timeline.begin()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_timeline(self) -> Recording:
        return self.timeline.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read_clock(self) -> ClockReading:
        return read_clock()

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Sets which part of a batch this rank takes on ``mesh_name``, and whether its output is the part's output.

        Must be called on every rank before the first call over that mesh; exactly one rank per part collects.
        """
        if mesh_name in self._meshes:
            raise ValueError(f"mesh {mesh_name!r} is already registered on rank {self.rank}")
        self._meshes[mesh_name] = dp_rank, is_collect

    def _query_mesh(self, mesh_name: str) -> tuple[int, bool]:
        """The part of a batch that this rank takes, and whether its output is the part's output."""
        if mesh_name not in self._meshes:
            known = sorted(self._meshes)
            raise ValueError(f"rank {self.rank} has no mesh {mesh_name!r}, only {known}; is init_model called first?")
        return self._meshes[mesh_name]


def _int_env(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"environment variable {name}={value!r}, expected a number; start workers by a launcher")
    return int(value)
