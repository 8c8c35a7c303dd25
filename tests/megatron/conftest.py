"""Fixtures for megatron tests: process groups of one process, and the table of CUDA with attention on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron.core.ops import TrainOps
from megatron.core.ops.cuda import cuda_ops
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from tests.megatron.flash_attention_form import flash_attention_on_cpu


@pytest.fixture(scope="module")
def cuda() -> TrainOps:
    return cuda_ops()


@pytest.fixture
def flash_calls() -> Iterator[list[tuple[str, int, int]]]:
    with flash_attention_on_cpu() as calls:
        yield calls


@pytest.fixture(scope="module")
def one_rank() -> Iterator[ProcessGroups]:
    """The groups of a world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield initialize_model_parallel()
    destroy_model_parallel()
    dist.destroy_process_group()
