"""The planner's Ascend table has the shapes and takes the memory of the one that runs, at the sizes of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

from tests.npu.op_parity import Maker, pairs, to_device
from tests.npu.rollout_op_cases import CASES, REAL
from tools.plan.collectives import CollectiveLog
from tools.plan.device import DEVICE, MemoryMeter, PlannedDevice
from tools.plan.launches import is_launch
from tools.plan.rollout_npu import npu_ops
from vllm_ascend.ops import rollout_ops

pytest.importorskip("npusim", reason="needs the simulator: source tests/npu/env.sh")

SMALL_BYTES = 1 << 20  # one-row results and such, of which torch_npu may make more or less


class LaunchCount(TorchDispatchMode):
    """Counts what torch launches while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if is_launch(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("entry", "case"), list(pairs(CASES)))
def test_planned_entry_takes_what_the_real_one_takes(entry: str, case: str) -> None:
    call = CASES[entry].cases[case](Maker(CASES[entry].dtypes[-1], is_fake=True), REAL)
    real, planned = MemoryMeter(), MemoryMeter()
    tensors = [to_device(x, "npu") for x in call.tensors]
    with torch.inference_mode(), real, LaunchCount() as launches:
        wanted = call.run(rollout_ops(), *tensors)
    with torch.inference_mode(), PlannedDevice(CollectiveLog(), planned) as device:
        tensors = [
            None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
            for x in call.tensors
        ]
        before = planned.peak_bytes = planned.now_bytes
        launches_before = device.launches
        found = call.run(npu_ops(), *tensors)
    assert _forms(found) == _forms(wanted)
    assert planned.peak_bytes - before == pytest.approx(real.peak_bytes, rel=0.05, abs=SMALL_BYTES)
    assert device.launches - launches_before == len(launches.names), launches.names


def _forms(outputs: object) -> list[tuple[tuple[int, ...], torch.dtype]]:
    several = outputs if isinstance(outputs, tuple | list) else [outputs]
    return [(tuple(x.shape), x.dtype) for x in several]
