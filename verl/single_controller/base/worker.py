"""Base of the classes that run as one process per device."""

from __future__ import annotations

import os

from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.timeline import ClockReading, Recording, Timeline, read_clock


class Worker:
    """One rank of a worker group (upstream: ``verl.single_controller.base.Worker``).

    The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT before it builds the worker; a
    missing one is a ValueError. A worker knows nothing of the launcher, so torchrun serves as well.
    """

    def __init__(self) -> None:
        self._rank = _int_env("RANK")
        self._world_size = _int_env("WORLD_SIZE")
        self._local_rank = _int_env("LOCAL_RANK")
        self._dispatch_dp_rank: dict[str, int] = {}
        self._collect_dp_rank: dict[str, bool] = {}
        self.timeline = Timeline()

    @property
    def rank(self) -> int:
        """Global rank in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of workers of the group."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """Index of this worker among those of its node, which is also its device index."""
        return self._local_rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_timeline(self) -> ClockReading:
        """Starts recording this rank's spans."""
        return self.timeline.begin()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_timeline(self) -> Recording:
        """Stops recording and returns the spans."""
        return self.timeline.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read_clock(self) -> ClockReading:
        """The clock of this rank's spans."""
        return read_clock()

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Sets which part of a batch this rank takes on ``mesh_name``, and whether its output is the part's output.

        Must be called on every rank before the first call over that mesh; exactly one rank per part collects.
        """
        if mesh_name in self._dispatch_dp_rank:
            raise ValueError(f"mesh {mesh_name!r} is already registered on rank {self.rank}")
        self._dispatch_dp_rank[mesh_name] = dp_rank
        self._collect_dp_rank[mesh_name] = is_collect

    def _query_dispatch_info(self, mesh_name: str) -> int:
        self._require_mesh(mesh_name)
        return self._dispatch_dp_rank[mesh_name]

    def _query_collect_info(self, mesh_name: str) -> bool:
        self._require_mesh(mesh_name)
        return self._collect_dp_rank[mesh_name]

    def _require_mesh(self, mesh_name: str) -> None:
        if mesh_name not in self._dispatch_dp_rank:
            known = sorted(self._dispatch_dp_rank)
            raise ValueError(f"rank {self.rank} has no mesh {mesh_name!r}, only {known}; is init_model called first?")


def _int_env(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"environment variable {name}={value!r}, expected a number; start workers by a launcher")
    return int(value)
