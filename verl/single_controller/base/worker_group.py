"""Groups of workers: calls that run on every rank, and their failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Registration, registered_methods
from verl.single_controller.base.worker import Worker

_DEATH_GRACE_S = 3.0  # how long to search for a dead rank when its peers have raised
_LOOK_INTERVAL_S = 0.01


class WorkerError(RuntimeError):
    """A worker's method raised; the message has its rank and traceback."""


class WorkerDiedError(RuntimeError):
    """A worker's process is gone."""


class WorkerTimeoutError(WorkerError):
    """A call took longer than allowed; the message names the ranks that had not answered."""


class ResourcePool:
    """How many worker processes run on each node, e.g. ``[8, 8]`` for two nodes of eight devices."""

    def __init__(self, process_on_nodes: list[int]) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(f"process_on_nodes={process_on_nodes}, expected at least one node with one process")
        self.process_on_nodes = list(process_on_nodes)

    @property
    def world_size(self) -> int:
        """Processes on all nodes."""
        return sum(self.process_on_nodes)


class ClassWithInitArgs:
    """A worker class and the arguments every rank builds it with."""

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs


@dataclass(frozen=True)
class Mesh:
    """The part of a batch that each rank takes, and whether the rank returns it: one entry per rank."""

    dp_ranks: tuple[int, ...]
    is_collect: tuple[bool, ...]

    @property
    def dp_size(self) -> int:
        """Number of parts a batch is split into."""
        return max(self.dp_ranks) + 1

    def problems(self) -> list[str]:
        """Returns the parts that do not have exactly one collecting rank."""
        found = []
        for dp in range(self.dp_size):
            ranks = [rank for rank, part in enumerate(self.dp_ranks) if part == dp and self.is_collect[rank]]
            if len(ranks) != 1:
                found.append(f"dp rank {dp} is collected from ranks {ranks}, expected exactly one")
        return found


class WorkerGroup:
    """Calls that look like a method call and run on every rank: ``group.update_actor(batch)``.

    Every method of the worker class marked ``@register`` is callable here. A launcher subclasses this and provides
    ``put`` and ``run``.
    """

    def __init__(self, name: str, worker_cls: type[Worker], world_size: int, timeout_s: float | None = None) -> None:
        self.name = name
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._methods = registered_methods(worker_cls)
        self._meshes: dict[str, Mesh] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            raise AttributeError(f"{type(self).__name__} has no method {name!r}; registered: {sorted(methods)}")
        return partial(self.call, name)

    def put(self, value: DataProto) -> Any:
        """Stores ``value`` once for all ranks; the result replaces it as an argument."""
        return value

    def run(
        self,
        method: str,
        per_rank: list[tuple[tuple, dict[str, Any]]],
        *,
        ranks: list[int],
        keep: list[bool],
        timeout_s: float | None,
    ) -> PendingCall:
        """Starts ``method`` on ``ranks`` with one (args, kwargs) each; outputs that are not kept come back as None."""
        raise TypeError(f"{type(self).__name__} is started by a launcher, which overrides run()")

    def call(self, method: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Calls a registered method; ``timeout_s`` (default: the group's, None = for ever) is not passed on to it.

        Raises:
            ValueError: the batch does not split over the mesh.
            WorkerError, WorkerDiedError, WorkerTimeoutError: the group is shut down then.
        """
        pending = self.start(method, *args, timeout_s=timeout_s, **kwargs)
        return pending.get() if self._methods[method].blocking else pending

    def start(self, method: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> PendingCall:
        """Starts a call like ``call`` and does not wait for it, so that another group can be called."""
        registration: Registration = self._methods[method]
        per_rank = registration.fns.dispatch(self, *args, **kwargs)
        keep = [True] if registration.is_rank_zero else registration.fns.kept(self)
        ranks = [0] if registration.is_rank_zero else list(range(self.world_size))
        pending = self.run(
            method,
            [per_rank[rank] for rank in ranks],
            ranks=ranks,
            keep=keep,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
        )
        if registration.is_rank_zero:
            pending.finish = lambda outputs: outputs[0]
        else:
            pending.finish = partial(registration.fns.collect, self)
        return pending

    def mesh(self, mesh_name: str) -> Mesh:
        """The table of ``mesh_name``, which the workers are asked for once."""
        if mesh_name not in self._meshes:
            answers = []
            for method in ("_query_dispatch_info", "_query_collect_info"):
                ranks = list(range(self.world_size))
                call = self.run(
                    method,
                    [((mesh_name,), {})] * self.world_size,
                    ranks=ranks,
                    keep=[True] * self.world_size,
                    timeout_s=self.timeout_s,
                )
                answers.append(tuple(call.get()))
            mesh = Mesh(*answers)
            if problems := mesh.problems():
                raise ValueError(f"mesh {mesh_name!r} of group {self.name!r}: {'; '.join(problems)}")
            self._meshes[mesh_name] = mesh
        return self._meshes[mesh_name]


def get_together(*calls: PendingCall) -> list[Any]:
    """Returns the outputs of calls of several groups that meet in collectives, where one failure blocks the others.

    Consumes answers; unblocked by the last one, or soon after the first failure. If a rank died, its death is raised
    and not the errors of ranks that waited for it.
    """
    outputs: dict[int, Any] = {}
    while len(outputs) < len(calls):
        for index, call in enumerate(calls):
            if index not in outputs and call.is_done():
                try:
                    outputs[index] = call.get()
                except WorkerError as error:
                    raise _death_among([other for other in calls if other is not call]) or error from None
        time.sleep(_LOOK_INTERVAL_S)
    return [outputs[index] for index in range(len(calls))]


def _death_among(calls: list[PendingCall]) -> WorkerDiedError | None:
    """Searches the calls for a dead rank until the grace time is over."""
    deadline = time.monotonic() + _DEATH_GRACE_S
    while calls and time.monotonic() < deadline:
        for call in [call for call in calls if call.is_done()]:
            calls.remove(call)
            try:
                call.get()
            except WorkerDiedError as death:
                return death
            except WorkerError:
                continue  # an error about the missing peer, like those of the group that failed first
        time.sleep(_LOOK_INTERVAL_S)
    return None


class PendingCall:
    """A call under way; ``get`` waits for it and returns the collected output.

    Args:
        wait: returns the outputs of the ranks.
        is_done: whether all ranks have answered or one has failed, so that ``wait`` returns or raises soon.
    """

    def __init__(self, wait: Callable[[], list[Any]], is_done: Callable[[], bool]) -> None:
        self._wait = wait
        self.is_done = is_done
        self.finish: Callable[[list[Any]], Any] = lambda outputs: outputs

    def get(self) -> Any:
        """The collected output; raises what the call raised."""
        return self.finish(self._wait())
