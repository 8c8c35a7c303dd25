"""Device tests are collected only where the simulator is loaded; everywhere else this says that they were left out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from tests.left_out import LEFT_OUT

# Tests of this folder that read sources and tables only, so they run with the main suite too.
NEED_NO_DEVICE = ("test_static_contract.py", "test_op_table_complete.py")
HAS_SIMULATOR = importlib.util.find_spec("npusim") is not None and importlib.util.find_spec("torch_npu") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave device tests out without a device; everything else is pytest's own decision."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if HAS_SIMULATOR or not is_test or collection_path.name in NEED_NO_DEVICE:
        return None
    config.stash.setdefault(LEFT_OUT, set()).add(collection_path.name)
    return True


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroups]:
    """The groups of a world of one device."""
    torch.npu.set_device(0)
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    yield initialize_model_parallel()
    destroy_model_parallel()
    dist.destroy_process_group()
