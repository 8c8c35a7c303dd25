"""A fixture for megatron tests that need process groups but only one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel


@pytest.fixture(scope="module")
def one_rank() -> Iterator[ProcessGroups]:
    """The groups of a world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield initialize_model_parallel()
    destroy_model_parallel()
    dist.destroy_process_group()
