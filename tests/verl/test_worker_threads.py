"""A worker in a process of Ray's own has its share of the cores, or the number of threads that the user sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from hf_formats.cores import usable_cores
from verl.single_controller.base.worker import Worker
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("num_workers", "given", "threads"),
    [(1, None, usable_cores()), (2, None, max(1, usable_cores() // 2)), (2, "3", 3)],
)
def test_torch_has_the_threads(
    num_workers: int, given: str | None, threads: int, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS") if given is None else monkeypatch.setenv("OMP_NUM_THREADS", given)
    pool, init = RayResourcePool([num_workers]), RayClassWithInitArgs(Worker)
    with RayWorkerGroup(pool, init, device_name="cpu", num_cpus_per_worker=0.25) as group:
        assert group.num_threads() == threads
