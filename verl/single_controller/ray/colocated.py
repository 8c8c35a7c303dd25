"""Several worker classes in one process per device, each called as a group of its own.

cls = create_colocated_worker_cls({"actor": RayClassWithInitArgs(Actor), "ref": RayClassWithInitArgs(Ref)})
groups = RayWorkerGroup(pool, cls).spawn({"actor", "ref"})
groups["actor"].update_actor(batch)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from verl.protocol import DataProto
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import PendingCall, WorkerGroup
from verl.single_controller.ray.resources import RayClassWithInitArgs

FusedWorkerCLSName = "FusedWorker"


class ColocatedWorkers(Worker):
    """The workers of one process by name, which are its attributes; each is built with its own arguments.

    Attributes:
        class_dict: the class of each worker and its arguments.
    """

    class_dict: ClassVar[Mapping[str, RayClassWithInitArgs]] = {}

    def __init__(self) -> None:
        super().__init__()
        workers = {name: init.cls(*init.args, **init.kwargs) for name, init in self.class_dict.items()}
        self.fused_worker_dict = workers
        for name, worker in workers.items():
            setattr(worker, Worker.fused_worker_attr_name, workers)
            setattr(self, name, worker)

    def call_worker(self, worker_name: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of one of the workers."""
        return getattr(self.fused_worker_dict[worker_name], method)(*args, **kwargs)


class SpawnedGroup(WorkerGroup):
    """The workers of one name in a group of ``ColocatedWorkers``; it ends with that group."""

    def __init__(self, parent: Any, worker_name: str, worker_cls: type[Worker]) -> None:
        super().__init__(f"{parent.name}.{worker_name}", worker_cls, parent.world_size, parent.timeout_s)
        self.parent, self.worker_name = parent, worker_name
        self.master_address, self.master_port = parent.master_address, parent.master_port

    def put(self, value: DataProto) -> Any:
        return self.parent.put(value)

    def run(
        self,
        method: str,
        per_rank: list[tuple[tuple, dict[str, Any]]],
        *,
        ranks: list[int],
        keep: list[bool],
        timeout_s: float | None,
    ) -> PendingCall:
        calls = [((self.worker_name, method, *args), kwargs) for args, kwargs in per_rank]
        pending: PendingCall = self.parent.run("call_worker", calls, ranks=ranks, keep=keep, timeout_s=timeout_s)
        return pending

    def references(self, method: str, per_rank: list[tuple[tuple, dict[str, Any]]], ranks: list[int]) -> list[Any]:
        calls = [((self.worker_name, method, *args), kwargs) for args, kwargs in per_rank]
        found: list[Any] = self.parent.references("call_worker", calls, ranks)
        return found

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The outputs of all ranks of a method, registered or not."""
        outputs: list[Any] = self.parent.execute_all_sync("call_worker", self.worker_name, method_name, *args, **kwargs)
        return outputs

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self.parent.execute_rank_zero_sync("call_worker", self.worker_name, method_name, *args, **kwargs)

    def shutdown(self) -> None:
        """Ends the processes, with all workers in them."""
        self.parent.shutdown()


def spawned_groups(parent: Any, class_dict: Mapping[str, RayClassWithInitArgs], names: Iterable[str]) -> dict[str, Any]:
    """A group per name; ValueError for a name that the processes have no worker of."""
    wanted = list(names)
    if unknown := sorted(set(wanted) - set(class_dict)):
        raise ValueError(f"group {parent.name!r} has no workers {unknown}, only {sorted(class_dict)}")
    return {name: SpawnedGroup(parent, name, class_dict[name].cls) for name in wanted}


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """The class whose processes hold a worker of every class; ``RayWorkerGroup.spawn`` makes a group of each."""
    return RayClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type[Worker]:
    """The same as a plain worker class, for a subclass whose methods call several of its workers."""
    return type(FusedWorkerCLSName, (ColocatedWorkers,), {"class_dict": dict(class_dict)})


def create_colocated_worker_cls_fused(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """``create_colocated_worker_cls`` under the name of upstream's other way to the same end."""
    return create_colocated_worker_cls(class_dict)
