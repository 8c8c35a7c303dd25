"""Base of the classes that run as one process per device."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch

from hf_formats.cores import threads_per_worker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.utils.net_utils import free_ports
from verl.utils.timeline import ClockReading, Recording, Timeline, read_clock

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class WorkerHelper:
    """What a worker can tell about its node."""

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """This node's address, and a port of it that is free."""
        return socket.gethostbyname(socket.gethostname()), str(free_ports(1)[0])

    def get_availale_master_addr_port(self) -> tuple[str, str]:
        """The same under upstream's older spelling."""
        return self.get_available_master_addr_port()


class Worker(WorkerHelper):
    """One rank of a worker group (upstream: ``verl.single_controller.base.Worker``).

    The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT before it builds the worker; a
    missing one is a ValueError. A worker knows nothing of the launcher, so torchrun serves as well.

    Attributes:
        local_rank: the index of this worker among those of its node, which is also its device index.
    """

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            os.environ[_VISIBLE] = cuda_visible_devices
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

    @classmethod
    def env_keys(cls) -> list[str]:
        """The variables that the launcher sets."""
        return ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", _VISIBLE]

    def get_master_addr_port(self) -> tuple[str, str]:
        """Where the ranks of the world meet."""
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def get_cuda_visible_devices(self) -> str:
        """The devices that this process sees, as its environment says it."""
        return os.environ.get(_VISIBLE, "not set")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(worker, ...)`` on every rank, with its part of each DataProto."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(...)`` on rank 0."""
        return func(*args, **kwargs)

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
