"""What several tests of the RL system need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
