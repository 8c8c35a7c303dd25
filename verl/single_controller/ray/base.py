"""RayWorkerGroup: one actor per device, called as one object, ended as one when any of them fails."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from textwrap import shorten
from types import TracebackType
from typing import Any

import ray
import ray.cloudpickle
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.protocol import DataProto
from verl.single_controller.base.worker_group import (
    PendingCall,
    WorkerDiedError,
    WorkerError,
    WorkerGroup,
    WorkerTimeoutError,
)
from verl.single_controller.ray.process import CallFailure, Pickled, ProcessAddress, WorkerProcess
from verl.single_controller.ray.resources import (
    RayClassWithInitArgs,
    RayResourcePool,
    Slot,
    actor_resources,
    in_world,
    is_one_node,
    rank_environment,
)
from verl.utils.device import resolve_device
from verl.utils.net_utils import LOOPBACK

logger = logging.getLogger(__name__)

# When a rank dies its peers' collectives fail too, sometimes before Ray reports the death. This is how long to wait for
# that report.
_DEATH_GRACE_S = 3.0
_KILL_TIMEOUT_S = 10.0
_REASON_CHARS = 400
# A small argument that is sent with the call costs the controller a fraction of an object in the store.
_MAX_INLINE_BYTES = 64 << 10
_LOOK_INTERVAL_S = 0.2  # between two checks for failures, while answers are outstanding
_SHORT_INTERVAL_S = 0.01  # the same when ``while_waiting`` drives another group


class RayWorkerGroup(WorkerGroup):
    """The workers of a resource pool, started when it is built.

    Args:
        resource_pool: processes per node.
        ray_cls_with_init: the worker class and its arguments.
        device_name: ``cpu``, ``npu`` or ``cuda``: which Ray resource each process takes one of; default: this
            machine's, or ``cpu`` when the pool has ``use_gpu=False``.
        num_cpus_per_worker: Ray CPUs each process takes; may be a fraction.
        timeout_s: limit of every call in seconds; None waits as long as all processes live.
        start_timeout_s: limit for the resources, and again for building the workers.
        num_later_ranks: ranks of a group that will join this group's world.
        joins: the group whose world these ranks join, after its own ranks and with its rendezvous.

    Attributes:
        master_address: address of rank 0's node; loopback when Ray has one node, so that nothing listens outside.
        master_port: port of rank 0's rendezvous: the driver's MASTER_PORT, else one that was free on its node.
        while_waiting: called repeatedly while this group waits for a call; it can drive another group.

    Raises:
        ValueError: the cluster lacks the resources.
        WorkerError, WorkerDiedError, WorkerTimeoutError: a worker could not be built; nothing is left behind.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        *,
        device_name: str | None = None,
        num_cpus_per_worker: float = 1,
        timeout_s: float | None = None,
        start_timeout_s: float = 600,
        num_later_ranks: int = 0,
        joins: RayWorkerGroup | None = None,
    ) -> None:
        cls = ray_cls_with_init.cls
        super().__init__(cls.__name__, cls, resource_pool.world_size, timeout_s)
        if device_name is None:
            device_name = resolve_device("auto") if resource_pool.use_gpu else "cpu"
        self.master_address = self.master_port = ""
        self._actors: list[Any] = []
        self._slots: list[Slot] = []
        # The groups whose ranks share a world: a collective of one may wait for a rank of another.
        self._world: list[RayWorkerGroup] = [self] if joins is None else joins._world
        if joins is not None:
            self._world.append(self)
        self._addresses: list[ProcessAddress | None] = [None] * self.world_size
        self.while_waiting: Callable[[], None] | None = None
        slots = resource_pool.reserve(device_name, num_cpus_per_worker, start_timeout_s)
        self._placement: PlacementGroup | None = slots[0].placement
        self._slots = in_world(slots, [] if joins is None else joins._slots, num_later_ranks)
        is_alone = is_one_node()
        try:
            self._actors = [_new_actor(slot, device_name, num_cpus_per_worker, is_alone) for slot in self._slots]
            self._start_workers(ray_cls_with_init, start_timeout_s, joins)
        except BaseException:
            self.shutdown()
            raise

    def pids(self) -> list[int]:
        return [address.pid for address in self._addresses if address is not None]

    def put(self, value: DataProto) -> ray.ObjectRef | Pickled:
        """Stores ``value`` once: in the object store, or pickled when that is small."""
        if value.num_tensor_bytes <= _MAX_INLINE_BYTES:
            content = ray.cloudpickle.dumps(value)
            if len(content) <= _MAX_INLINE_BYTES:
                return Pickled(content)
        return ray.put(value)

    def run(
        self,
        method: str,
        per_rank: list[tuple[tuple, dict[str, Any]]],
        *,
        ranks: list[int],
        keep: list[bool],
        timeout_s: float | None,
    ) -> PendingCall:
        if not self._actors:
            raise WorkerError(f"group {self.name!r} is shut down, {method} cannot run")
        refs = {
            self._actors[rank].call.remote(method, kept, *args, **kwargs): rank
            for rank, (args, kwargs), kept in zip(ranks, per_rank, keep, strict=True)
        }
        limit = _TimeLimit(timeout_s)
        return PendingCall(partial(self._wait, method, refs, limit), _Progress(list(refs), limit).is_over)

    def shutdown(self) -> None:
        """Kills every process, waits until Ray reports that they are gone, and releases the resources."""
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor, no_restart=True)
        pending = [actor.address.remote() for actor in actors]
        _, alive = ray.wait(pending, num_returns=len(pending), timeout=_KILL_TIMEOUT_S) if pending else ([], [])
        if alive:
            logger.warning(
                "%d processes of %s were still there %.0f s after the kill", len(alive), self.name, _KILL_TIMEOUT_S
            )
        placement, self._placement = self._placement, None
        if placement is not None:
            remove_placement_group(placement)

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _start_workers(
        self, ray_cls_with_init: RayClassWithInitArgs, timeout_s: float, joins: RayWorkerGroup | None
    ) -> None:
        refs = {actor.address.remote(): rank for rank, actor in enumerate(self._actors)}
        self._addresses = list(self._wait("start of the process", refs, _TimeLimit(timeout_s)))
        first: ProcessAddress = self._addresses[0]  # type: ignore[assignment]
        own_addr = LOOPBACK if is_one_node() else first.node_ip
        self.master_address = own_addr if joins is None else joins.master_address
        own_port = os.environ.get("MASTER_PORT") or str(first.free_port)
        self.master_port = own_port if joins is None else joins.master_port
        env = {"MASTER_ADDR": self.master_address, "MASTER_PORT": self.master_port}
        init = ray_cls_with_init
        blob = ray.put(ray.cloudpickle.dumps((init.cls, init.args, init.kwargs)))
        refs = {actor.start.remote(env, blob): rank for rank, actor in enumerate(self._actors)}
        self._wait("__init__", refs, _TimeLimit(timeout_s))
        logger.info(
            "%s: %d workers, rendezvous %s:%s", self.name, self.world_size, self.master_address, self.master_port
        )

    def _wait(self, method: str, refs: dict[ray.ObjectRef, int], limit: _TimeLimit) -> list[Any]:
        """Outputs in rank order. Consumes answers; unblocked by the last one, soon after a failure, or by the limit."""
        outputs: dict[int, Any] = {}
        pending = list(refs)
        others: _Probes = {}
        checks_others_at = time.monotonic() + _DEATH_GRACE_S
        while pending:
            interval_s = _LOOK_INTERVAL_S
            if self.while_waiting is not None:
                self.while_waiting()
                interval_s = _SHORT_INTERVAL_S
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=min(interval_s, limit.remaining_s()))
            for ref in ready:
                outputs[refs[ref]] = self._output(method, ref, refs[ref])
            if not others and time.monotonic() > checks_others_at:
                others = self._probes(but=self)
                checks_others_at = time.monotonic() + _DEATH_GRACE_S
            if others and (death := _first_death(others, method, 0.0)) is not None:
                raise self._failed(death)
            if pending and not limit.remaining_s():
                silent = [self._where(refs[ref]) for ref in pending]
                raise self._failed(
                    WorkerTimeoutError(f"{self.name}.{method}: no answer after {limit.timeout_s} s from {silent}")
                )
        return [outputs[rank] for rank in sorted(outputs)]

    def _output(self, method: str, ref: ray.ObjectRef, rank: int) -> Any:
        try:
            output = ray.get(ref)
        except RayActorError as error:
            raise self._failed(self._died(rank, method, error)) from error
        if isinstance(output, CallFailure):
            raise self._failed(self._find_death(method) or self._raised(rank, method, output))
        return output

    def _find_death(self, method: str) -> WorkerDiedError | None:
        """Searches for a dead rank until the grace time is over; it is the cause when its peers raise."""
        return _first_death(self._probes(), method, _DEATH_GRACE_S)

    def _probes(self, but: RayWorkerGroup | None = None) -> _Probes:
        """Starts a call on every rank of the world but those of one group; only a dead rank answers with an error."""
        groups = [group for group in self._world if group is not but]
        return {actor.address.remote(): (group, rank) for group in groups for rank, actor in enumerate(group._actors)}

    def _failed(self, error: WorkerDiedError | WorkerError) -> WorkerDiedError | WorkerError:
        logger.error("%s: ending all %d workers: %s", self.name, self.world_size, str(error).splitlines()[0])
        self.shutdown()
        return error

    def _died(self, rank: int, method: str, cause: RayActorError) -> WorkerDiedError:
        # The rest of Ray's message guesses at the cause.
        reason = shorten(str(cause), width=_REASON_CHARS, placeholder=" ...")
        return WorkerDiedError(f"{self.name}: {self._where(rank)} died during {method}: {reason}")

    def _raised(self, rank: int, method: str, failure: CallFailure) -> WorkerError:
        where = self._where(rank)
        return WorkerError(f"{self.name}.{method} failed on {where}: {failure.summary}\n{failure.traceback}")

    def _where(self, rank: int) -> str:
        address, rank = self._addresses[rank], self._slots[rank].rank
        return f"rank {rank}" if address is None else f"rank {rank} (pid {address.pid} on {address.node_ip})"


_Probes = dict[ray.ObjectRef, tuple[RayWorkerGroup, int]]


def _first_death(probes: _Probes, method: str, timeout_s: float) -> WorkerDiedError | None:
    """Returns the first rank found dead within the time, during ``method``; removes answered probes."""
    deadline = time.monotonic() + timeout_s
    while probes:
        ready, _ = ray.wait(list(probes), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        for ref in ready:
            group, rank = probes.pop(ref)
            try:
                ray.get(ref)
            except RayActorError as error:
                return group._died(rank, method, error)
    return None


class _TimeLimit:
    """When a call must have its answers; ``timeout_s`` None means for ever."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())


class _Progress:
    """Tells whether waiting for a call soon returns: all ranks have answered, one has failed, or its time is up."""

    def __init__(self, refs: list[ray.ObjectRef], limit: _TimeLimit) -> None:
        self._open, self._limit = refs, limit
        self._has_failed = False

    def is_over(self) -> bool:
        if self._open and not self._has_failed:
            ready, self._open = ray.wait(self._open, num_returns=len(self._open), timeout=0)
            self._has_failed = any(_has_failed(ref) for ref in ready)
        return self._has_failed or not self._open or not self._limit.remaining_s()


def _has_failed(ref: ray.ObjectRef) -> bool:
    try:
        return isinstance(ray.get(ref), CallFailure)
    except RayActorError:
        return True


def _new_actor(slot: Slot, device_name: str, num_cpus: float, is_one_node: bool) -> Any:
    remote_class = ray.remote(max_restarts=0, max_task_retries=0)(WorkerProcess)
    settings: dict[str, Any] = actor_resources(device_name, num_cpus)
    num_on_node = slot.world_size if is_one_node else slot.local_world_size
    settings["runtime_env"] = {"env_vars": rank_environment(slot, device_name, num_on_node)}
    placement = PlacementGroupSchedulingStrategy(slot.placement, slot.bundle_index)
    return remote_class.options(**settings, scheduling_strategy=placement).remote()
