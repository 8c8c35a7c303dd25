"""The op tables that a run of each device has, if its config names none."""

from __future__ import annotations

import importlib.util

import pytest

from megatron.core.ops import resolve
from verl.trainer.config import TrainerConfig
from verl.utils.device import ops_providers


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "npu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.needs_torch("2.10", "torch.nn.functional.grouped_mm"),
                pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
            ],
        ),
    ],
)
def test_every_device_trains_through_a_table_of_its_own(device: str) -> None:
    provider, _ = ops_providers(TrainerConfig(), device)
    assert any("native" in name for name in resolve(provider).names.values())
    assert ops_providers(TrainerConfig(train_ops="mine:table"), device)[0] == "mine:table"
