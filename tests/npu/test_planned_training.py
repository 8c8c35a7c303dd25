"""The planner's Ascend table of training launches as much as the one that runs, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops import TrainOps
from mindspeed.ops import train_ops
from tests.npu.op_parity import Call, Maker, pairs, to_device
from tests.npu.test_planned_rollout import LaunchCount
from tests.npu.train_op_cases import CASES, REAL
from tools.plan.collectives import CollectiveLog
from tools.plan.device import DEVICE, MemoryMeter, PlannedDevice
from tools.plan.ops import Routing
from tools.plan.ops import train_ops as planned_ops

pytest.importorskip("npusim", reason="needs the simulator: source tests/npu/env.sh")
ENTRIES = (
    "rms_norm",
    "swiglu",
    "rotary_interleaved",
    "core_attention",
    "grouped_matmul",
    "token_permute",
    "token_unpermute",
    "adamw_step",
)
ONCE = {"aten.ones.default", "aten.triu.default"}  # the causal mask of a table's first attention


def run(call: Call, ops: TrainOps, tensors: list[Tensor | None]) -> None:
    """The call and the gradients of what it returns."""
    out: Any = call.run(ops, *tensors)
    outs = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor) and x.requires_grad]
    if outs:
        torch.autograd.backward(outs, [torch.empty_like(x) for x in outs])


@pytest.mark.parametrize(("entry", "case"), list(pairs({name: CASES[name] for name in ENTRIES})))
def test_planned_entry_launches_what_the_real_one_launches(entry: str, case: str) -> None:
    if "without_tokens" in case:
        pytest.skip("a plan has tokens everywhere")
    call = CASES[entry].cases[case](Maker(CASES[entry].dtypes[-1], is_fake=True), REAL["tp1"])
    real = train_ops()
    tensors = [to_device(x, "npu") for x in call.tensors]
    with LaunchCount() as launches:
        run(call, real, tensors)
    with PlannedDevice(CollectiveLog(), MemoryMeter()) as device:
        tensors = [
            None
            if x is None
            else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).requires_grad_(x.requires_grad)
            for x in call.tensors
        ]
        before = device.launches
        run(call, planned_ops("npu", Routing()), tensors)
    assert device.launches - before == len([name for name in launches.names if name not in ONCE]), launches.names
