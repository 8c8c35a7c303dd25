"""Where the processes of a group run and what they see: placement, Ray resources, environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from verl.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool

_DEVICE_RESOURCES = {"cpu": None, "npu": "NPU", "cuda": "GPU", "gpu": "GPU"}
_PASSED_ON = ("VLLM_", "HCCL_", "ASCEND_", "NCCL_", "GLOO_")


class RayResourcePool(ResourcePool):
    """Reserves, per node, one bundle for each process; the bundles of an entry are on one node."""

    def __init__(self, process_on_nodes: list[int]) -> None:
        super().__init__(process_on_nodes)
        self._groups: list[PlacementGroup] = []

    def reserve(self, device_name: str, num_cpus: float, timeout_s: float) -> list[Slot]:
        """One slot per rank, nodes ordered by address.

        Raises:
            ValueError: unknown device, or the cluster does not have the resources within ``timeout_s`` seconds.
        """
        bundle = _bundle(device_name, num_cpus)
        for count in self.process_on_nodes:
            self._groups.append(placement_group([bundle] * count, strategy="STRICT_PACK"))
        for group in self._groups:
            if not group.wait(timeout_s):
                self.release()
                raise ValueError(
                    f"no room for process_on_nodes={self.process_on_nodes}, {bundle} per process, after {timeout_s} s; "
                    f"Ray has {ray.cluster_resources()} and of these free {ray.available_resources()}"
                )
        ordered = sorted(self._groups, key=_node_ip)
        local = [(group, index) for group in ordered for index in range(group.bundle_count)]
        return [Slot(rank, index, len(local), group) for rank, (group, index) in enumerate(local)]

    def release(self) -> None:
        """Gives the bundles back."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and the arguments every rank builds it with (upstream's name; no actor class needed)."""


@dataclass(frozen=True)
class Slot:
    """The place of one rank."""

    rank: int
    local_rank: int
    world_size: int
    placement: PlacementGroup


def actor_resources(device_name: str, num_cpus: float) -> dict[str, object]:
    """Options of ``ray.remote`` for one process: CPUs, and one device unless the device is the CPU."""
    bundle = _bundle(device_name, num_cpus)
    num_gpus = bundle.pop("GPU", 0)
    return {"num_cpus": bundle.pop("CPU"), "num_gpus": num_gpus, "resources": bundle}


def rank_environment(slot: Slot, device_name: str, driver_env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables a rank needs before torch is imported.

    Every process sees all devices of its node and picks number LOCAL_RANK, so Ray must not hide the others.
    """
    env = {name: value for name, value in driver_env.items() if name.startswith(_PASSED_ON)}
    env |= {"RANK": str(slot.rank), "WORLD_SIZE": str(slot.world_size), "LOCAL_RANK": str(slot.local_rank)}
    if device_name == "cpu":
        env["OMP_NUM_THREADS"] = "1"
    else:
        env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        env["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"] = "1"
    return env


def _bundle(device_name: str, num_cpus: float) -> dict[str, float]:
    if device_name not in _DEVICE_RESOURCES:
        raise ValueError(f"device_name={device_name!r}, expected one of {sorted(_DEVICE_RESOURCES)}")
    resource = _DEVICE_RESOURCES[device_name]
    return {"CPU": num_cpus} | ({resource: 1} if resource else {})


def _node_ip(group: PlacementGroup) -> str:
    node_id = placement_group_table(group)["bundles_to_node_id"][0]
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
