"""Upstream's ways to call a group without a registration, and to call it from another process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray.colocated import ColocatedWorkers, SpawnedGroup, spawned_groups
from verl.single_controller.ray.resources import RayClassWithInitArgs

_ANSWER_TIMEOUT_S = 1.0


class DirectCalls(WorkerGroup):
    """A group whose ranks are ``WorkerProcess`` actors."""

    ray_cls_with_init: RayClassWithInitArgs
    worker_names: list[str]
    _actors: list[Any]

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: list[str] | None = None,
        worker_handles: list[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> Any:
        """The group of workers that are there, by their names or actors in rank order; they do not end with it."""
        return cls(
            None,  # type: ignore[arg-type]
            ray_cls_with_init=ray_cls_with_init,  # type: ignore[call-arg]
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )

    def references(
        self, method: str, per_rank: list[tuple[tuple, dict[str, Any]]], ranks: list[int]
    ) -> list[ray.ObjectRef]:
        return [
            self._actors[rank].invoke.remote(method, *args, **kwargs)
            for rank, (args, kwargs) in zip(ranks, per_rank, strict=True)
        ]

    def _is_worker_alive(self, rank: int) -> bool:
        questions: dict[int, ray.ObjectRef] = self.__dict__.setdefault("_questions", {})
        if rank not in questions:
            questions[rank] = self._actors[rank].address.remote()
        try:
            ray.get(questions[rank], timeout=_ANSWER_TIMEOUT_S)
        except GetTimeoutError:
            return True  # it is busy, and has one question to answer
        except RayActorError:
            return False
        del questions[rank]
        return True

    @property
    def workers(self) -> list[Any]:
        """The actors, in rank order."""
        return list(self._actors)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, SpawnedGroup]:
        """A group per name of a worker of ``create_colocated_worker_cls``."""
        cls = self.ray_cls_with_init.cls
        if not issubclass(cls, ColocatedWorkers):
            raise ValueError(f"group {self.name!r} is not of create_colocated_worker_cls, it cannot be spawned")
        return spawned_groups(self, cls.class_dict, prefix_set)

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, SpawnedGroup]:
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Makes each group of ``spawn`` an attribute of this one."""
        for name, group in self.spawn(prefix_set).items():
            setattr(self, name, group)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Starts a method, registered or not, on rank 0; for ``ray.get``, which raises what it raises."""
        return self._actors[0].invoke.remote(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return ray.get(self.execute_rank_zero_async(method_name, *args, **kwargs))

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Starts a method on all ranks; when all arguments are lists with an entry per rank, each rank gets its own."""
        values = [*args, *kwargs.values()]
        if values and all(isinstance(value, list) and len(value) == self.world_size for value in values):
            return [
                actor.invoke.remote(
                    method_name, *(v[rank] for v in args), **{key: v[rank] for key, v in kwargs.items()}
                )
                for rank, actor in enumerate(self._actors)
            ]
        return [actor.invoke.remote(method_name, *args, **kwargs) for actor in self._actors]

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return list(ray.get(self.execute_all_async(method_name, *args, **kwargs)))

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        return self.execute_all_async(method_name, *args, **kwargs)
