"""The pools of devices of a user's trainer, by name, and which role has which (upstream: ``ray_trainer``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ray

from verl.single_controller.ray import RayResourcePool
from verl.trainer.ppo.utils import Role


@dataclass
class ResourcePoolManager:
    """Pools by name.

    Attributes:
        resource_pool_spec: name -> processes per node.
        mapping: role -> name of its pool; roles of one pool share its devices.
        resource_pool_dict: name -> pool, filled by ``create_resource_pool``.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: Mapping[Role, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Makes the pools; ValueError when Ray's cluster has fewer devices than they need.

        On a cluster without accelerators each process needs a CPU.
        """
        for name, processes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(processes)
        resources = ray.cluster_resources()
        kind = next((kind for kind in ("NPU", "GPU") if resources.get(kind)), "CPU")
        needed, present = self.get_n_gpus(), resources.get(kind, 0)
        if present < needed:
            raise ValueError(f"the pools {self.resource_pool_spec} need {needed} {kind}s, Ray has {present:g}")

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """The number of devices of all pools."""
        return sum(count for processes in self.resource_pool_spec.values() for count in processes)
