"""The Ray actor around one worker: it builds the worker, calls it, and returns exceptions as values."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Any

import ray
import ray.cloudpickle

from verl.utils.net_utils import free_ports
from verl.utils.rank_log import open_rank_log


@dataclass(frozen=True)
class ProcessAddress:
    """The node and pid of a worker process, and a TCP port that was free on its node when this was made."""

    node_ip: str
    pid: int
    free_port: int


@dataclass(frozen=True)
class CallFailure:
    """An exception as text: exceptions of foreign types need not survive pickling."""

    summary: str
    traceback: str


@dataclass(frozen=True)
class Pickled:
    """An argument that is sent with the calls, pickled once for all ranks."""

    content: bytes


class WorkerProcess:
    """Runs one worker. The environment of the rank is set by Ray before the interpreter starts."""

    def __repr__(self) -> str:
        """Ray prefixes each line of this process's output with it, also in its log files."""
        return f"rank {os.environ['RANK']}"

    def address(self) -> ProcessAddress:
        """The address of this process; also a call that a dead process does not answer."""
        return ProcessAddress(ray.util.get_node_ip_address(), os.getpid(), free_ports(1)[0])

    def start(self, env: dict[str, str], pickled_worker: bytes) -> CallFailure | None:
        """Sets the environment that is known only when all processes run, then builds the worker."""
        os.environ.update(env)
        try:
            open_rank_log(f"{ray.util.get_node_ip_address()}, pid {os.getpid()}")
            cls, args, kwargs = ray.cloudpickle.loads(pickled_worker)
            self.worker = cls(*args, **kwargs)
        except Exception as error:
            return _failure(error)
        return None

    def call(self, method: str, keep: bool, /, *args: Any, **kwargs: Any) -> Any:
        """The output of the worker's method, None if it is not needed, a ``CallFailure`` if it raised."""
        try:
            named = {name: _value(argument) for name, argument in kwargs.items()}
            output = getattr(self.worker, method)(*map(_value, args), **named)
        except Exception as error:
            return _failure(error)
        return output if keep else None


def _value(argument: Any) -> Any:
    return ray.cloudpickle.loads(argument.content) if isinstance(argument, Pickled) else argument


def _failure(error: Exception) -> CallFailure:
    return CallFailure(f"{type(error).__name__}: {error}", traceback.format_exc())
