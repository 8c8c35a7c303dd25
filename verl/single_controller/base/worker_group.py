"""Groups of workers: calls that run on every rank, and their failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Registration, registered_methods
from verl.single_controller.base.mesh import Mesh
from verl.single_controller.base.worker import Worker

logger = logging.getLogger(__name__)
_LOOK_INTERVAL_S = 0.01


class WorkerError(RuntimeError):
    """A worker's method raised; the message has its rank and traceback."""


class WorkerDiedError(RuntimeError):
    """A worker's process is gone."""


class WorkerTimeoutError(WorkerError):
    """A call took longer than allowed; the message names the ranks that had not answered."""


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
        return self.start(method, *args, timeout_s=timeout_s, **kwargs).get()

    def start(self, method: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> PendingCall:
        """Starts a call like ``call`` and does not wait for it, so that another group can be called."""
        registration: Registration = self._methods[method]
        args = tuple(_complete(value) for value in args)
        kwargs = {name: _complete(value) for name, value in kwargs.items()}
        per_rank = registration.fns.dispatch(self, *args, **kwargs)
        ranks = [0] if registration.is_rank_zero else list(range(self.world_size))
        keep = [True] if registration.is_rank_zero else registration.fns.kept(self)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        pending = self.run(method, [per_rank[rank] for rank in ranks], ranks=ranks, keep=keep, timeout_s=timeout_s)
        if registration.is_rank_zero:
            pending.finish = lambda outputs: outputs[0]
        else:
            pending.finish = partial(_collect, registration, self, _rows_before_padding(args, kwargs))
        return pending

    def mesh(self, mesh_name: str) -> Mesh:
        """The table of ``mesh_name``, which the workers are asked for once."""
        if mesh_name not in self._meshes:
            call = self.run(
                "_query_mesh",
                [((mesh_name,), {})] * self.world_size,
                ranks=list(range(self.world_size)),
                keep=[True] * self.world_size,
                timeout_s=self.timeout_s,
            )
            mesh = Mesh(*zip(*call.get(), strict=True))
            if problems := mesh.problems():
                raise ValueError(f"mesh {mesh_name!r} of group {self.name!r}: {'; '.join(problems)}")
            self._meshes[mesh_name] = mesh
        return self._meshes[mesh_name]


def _collect(registration: Registration, group: WorkerGroup, num_rows: int | None, outputs: list[Any]) -> Any:
    output = registration.fns.collect(group, outputs)
    if num_rows is not None and isinstance(output, DataProto) and len(output) > num_rows:
        return output.slice(0, num_rows)
    return output


def _complete(argument: Any) -> Any:
    """The output of a call that is still under way, which another call has as its argument."""
    return argument.get() if isinstance(argument, PendingCall) else argument


def _rows_before_padding(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """The rows of the first batch with padding enabled, None without one: the output has no more."""
    batches = (value for value in (*args, *kwargs.values()) if isinstance(value, DataProto))
    return next((len(batch) for batch in batches if batch.is_padding_enabled()), None)


def get_together(*calls: PendingCall) -> list[Any]:
    """Returns the outputs of calls of several groups that meet in collectives, where one failure blocks the others.

    Consumes answers; unblocked by the last one, or soon after the first failure or when a call's time is up. If a rank
    of any group died, its group's or another one's call raises its death, not the errors of ranks that waited for it.
    """
    outputs: dict[int, Any] = {}
    while len(outputs) < len(calls):
        for index, call in enumerate(calls):
            if index not in outputs and call.is_done():
                outputs[index] = call.get()
        time.sleep(_LOOK_INTERVAL_S)
    return [outputs[index] for index in range(len(calls))]


@dataclass
class PendingCall:
    """A call under way; ``get`` waits for it and returns the collected output.

    Attributes:
        wait: returns the outputs of the ranks.
        is_done: whether all ranks have answered, one has failed or the call's time is up, so that ``wait`` returns or
            raises soon.
        finish: makes the output of the call from those of the ranks.
    """

    wait: Callable[[], list[Any]]
    is_done: Callable[[], bool]
    finish: Callable[[list[Any]], Any] = lambda outputs: outputs

    def get(self) -> Any:
        """The collected output; raises what the call raised."""
        return self.finish(self.wait())
