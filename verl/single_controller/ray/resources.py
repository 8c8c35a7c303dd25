"""Placement, Ray resources and environment of the processes of a group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from hf_formats.cores import THREADS, threads_per_worker
from verl.utils.rank_log import LOG_DIR

_DEVICE_RESOURCES = {"cpu": None, "npu": "NPU", "cuda": "GPU", "gpu": "GPU"}
_PASSED_ON = ("VLLM_", "HCCL_", "ASCEND_", "NCCL_", "GLOO_", LOG_DIR)


class NoRoomError(ValueError):
    """The cluster lacks resources for a group; the text lists what is missing."""


class RayResourcePool:
    """How many worker processes run on each node, e.g. ``[8, 8]`` for two nodes of eight devices.

    Each group reserves one bundle per node with room for all of the node's processes; no two entries share a node.
    Groups of one pool are beside each other where there is room (CPUs).

    Args:
        process_on_nodes: processes per node.
        use_gpu: each process takes an accelerator, where the cluster has any.
    """

    def __init__(self, process_on_nodes: list[int] | None = None, use_gpu: bool = True) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ValueError(f"process_on_nodes={process_on_nodes}, expected at least one node with one process")
        self.process_on_nodes, self.use_gpu = list(process_on_nodes), use_gpu

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def reserve(self, device_name: str, num_cpus: float, timeout_s: float) -> list[Slot]:
        """One slot per rank, nodes ordered by address.

        Raises:
            ValueError: unknown device.
            NoRoomError: the cluster does not have the resources within ``timeout_s`` seconds.
        """
        bundle = _bundle(device_name, num_cpus)
        bundles = [{name: amount * count for name, amount in bundle.items()} for count in self.process_on_nodes]
        # Without SPREAD a large CPU node would take the processes of two nodes.
        strategy = "STRICT_SPREAD" if len(bundles) > 1 else "PACK"
        group = placement_group(bundles, strategy=strategy)
        if not group.wait(timeout_s):
            remove_placement_group(group)
            raise NoRoomError(
                f"no room for process_on_nodes={self.process_on_nodes}, {bundle} per process, after {timeout_s} s; "
                f"{_missing(bundles)}; Ray has {ray.cluster_resources()} on {_num_nodes()} nodes and of these free "
                f"{ray.available_resources()}"
            )
        addresses = _bundle_addresses(group)
        nodes = sorted(range(len(bundles)), key=lambda node: (addresses[node], node))
        local = [(node, index) for node in nodes for index in range(self.process_on_nodes[node])]
        return [
            Slot(rank, index, len(local), group, node, addresses[node], self.process_on_nodes[node])
            for rank, (node, index) in enumerate(local)
        ]


class RayClassWithInitArgs:
    """A worker class and the arguments every rank builds it with; a class under ``ray.remote`` counts as the class."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        metadata = getattr(cls, "__ray_metadata__", None)
        self.cls: type = cls if metadata is None else metadata.modified_class
        self.args, self.kwargs = args, kwargs


@dataclass(frozen=True)
class Slot:
    """The rank, node and placement of one process."""

    rank: int
    local_rank: int
    world_size: int
    placement: PlacementGroup
    bundle_index: int
    node: str = ""  # its address
    local_world_size: int = 1  # processes of the group on the node


def in_world(slots: Sequence[Slot], earlier: Sequence[Slot], num_later_ranks: int) -> list[Slot]:
    """Renumbers ``slots`` as ranks of a larger world after the ``earlier`` ones, also within a shared node."""
    taken = Counter(slot.node for slot in earlier)
    world_size = len(earlier) + len(slots) + num_later_ranks
    return [
        replace(
            slot, rank=len(earlier) + slot.rank, local_rank=taken[slot.node] + slot.local_rank, world_size=world_size
        )
        for slot in slots
    ]


def actor_resources(device_name: str, num_cpus: float) -> dict[str, object]:
    """Options of ``ray.remote`` for one process: CPUs, and one device unless the device is the CPU."""
    bundle = _bundle(device_name, num_cpus)
    num_gpus = bundle.pop("GPU", 0)
    return {"num_cpus": bundle.pop("CPU"), "num_gpus": num_gpus, "resources": bundle}


def rank_environment(
    slot: Slot, device_name: str, num_on_node: int, driver_env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables a rank needs before torch is imported; ``num_on_node`` ranks share its node's cores.

    Every process sees all devices of its node and picks number LOCAL_RANK, so Ray must not hide the others. All
    ranks have as many threads as the driver's node gives a worker. Without it Ray would give them their CPUs, mostly 1.
    """
    env = {name: value for name, value in driver_env.items() if name.startswith(_PASSED_ON)}
    env |= {"RANK": str(slot.rank), "WORLD_SIZE": str(slot.world_size), "LOCAL_RANK": str(slot.local_rank)}
    env |= {"RAY_LOCAL_RANK": str(slot.local_rank), "WG_BACKEND": "ray"}
    env |= dict.fromkeys(("LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE"), str(slot.local_world_size))
    env[THREADS] = str(threads_per_worker(num_on_node, driver_env))
    if device_name != "cpu":
        env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        env["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"] = "1"
    return env


def _bundle(device_name: str, num_cpus: float) -> dict[str, float]:
    if device_name not in _DEVICE_RESOURCES:
        raise ValueError(f"device_name={device_name!r}, expected one of {sorted(_DEVICE_RESOURCES)}")
    resource = _DEVICE_RESOURCES[device_name]
    return {"CPU": num_cpus} | ({resource: 1} if resource else {})


def _missing(bundles: list[dict[str, float]]) -> str:
    """Returns which resources of the bundles' sum are not free in the cluster."""
    free = ray.available_resources()
    wanted = {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}
    short = {name: amount - free.get(name, 0.0) for name, amount in wanted.items() if amount > free.get(name, 0.0)}
    if not short:
        return f"enough is free, but not as {len(bundles)} parts on as many nodes"
    return "missing: " + ", ".join(f"{amount:g} {name}" for name, amount in short.items())


def is_one_node() -> bool:
    """Whether Ray has a single node, so that all ranks of every group are on it."""
    return _num_nodes() == 1


def _num_nodes() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


def _bundle_addresses(group: PlacementGroup) -> list[str]:
    address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed = placement_group_table(group)["bundles_to_node_id"]
    return [address_of[placed[index]] for index in range(group.bundle_count)]
