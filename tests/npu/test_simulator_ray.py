"""Ray's workers have the devices too: their environment comes from the driver's."""

from __future__ import annotations

import ray

from tests.ray_workers import ray_with_forked_workers


@ray.remote(num_cpus=1, resources={"NPU": 1})
def on_a_device() -> tuple[float, int]:
    import torch

    return torch.ones(3, device="npu").sum().item(), torch.npu.device_count()


def test_a_worker_sees_the_devices() -> None:
    """Ray gives the worker one of the two in ASCEND_RT_VISIBLE_DEVICES."""
    with ray_with_forked_workers(num_cpus=1, resources={"NPU": 2}, configure_logging=False):
        assert ray.get(on_a_device.remote(), timeout=120) == (3.0, 1)
