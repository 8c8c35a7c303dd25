"""What several tests of the RL system need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray_workers import ray_with_forked_workers


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_with_forked_workers(num_cpus=1):
        yield
