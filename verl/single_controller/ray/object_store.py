"""Ray's object store and environment, for users' code (upstream: ``verl.utils.ray_utils``)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from verl.utils.errors import BatchError

_NOSET = (
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR",
)
_MAX_THREADS = 16


def ray_noset_visible_devices(env_vars: Mapping[str, str] = os.environ) -> bool:
    """Whether Ray is set to leave the variables of visible devices alone."""
    return any(env_vars.get(name) for name in _NOSET)


def parallel_put(data_list: list[Any], max_workers: int | None = None) -> list[ray.ObjectRef]:
    """Stores every entry in Ray's object store by a pool of threads; the references are in the order of the entries."""
    if not data_list:
        raise BatchError("data_list is empty, expected at least one entry to store")
    with ThreadPoolExecutor(max_workers or min(len(data_list), _MAX_THREADS)) as pool:
        return list(pool.map(ray.put, data_list))


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this thread; a new one, set for the thread, when it has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    policy = asyncio.get_event_loop_policy()
    try:
        return policy.get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop
