"""Every entry of mindspeed's table equals its reference, and a native one executes the torch_npu ops that it claims."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.reference import reference_ops
from mindspeed.ops import train_ops
from tests.npu.kernel_limits import Watch
from tests.npu.op_parity import BF16, FP32, Maker, assert_same, assert_same_form, outcome, pairs
from tests.npu.train_op_cases import CASES, REAL, TINY

npusim = pytest.importorskip("npusim", reason="needs the simulator: source tests/npu/env.sh")
NATIVE, REFERENCE = train_ops(), reference_ops()
# Other models' routing, which CANN takes from 8.5 on.
NOT_DEEPSEEKS = {"router_without_groups"}
# No kernel of CANN takes a vocabulary that is split over ranks.
REFERENCES = ("log_sum_exp", "cross_entropy_grad")


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("entry", "case"), list(pairs(CASES)))
def test_native_equals_reference(entry: str, case: str, dtype: torch.dtype) -> None:
    how = CASES[entry]
    if dtype not in how.dtypes:
        pytest.skip(f"{entry} takes {how.dtypes} only")
    call = how.cases[case](Maker(dtype), TINY)
    assert_same(outcome(NATIVE, call, "npu"), outcome(REFERENCE, call, "cpu"), how.tolerance)


@pytest.mark.parametrize("layout", list(REAL))
@pytest.mark.parametrize(("entry", "case"), list(pairs(CASES)))
def test_shapes_and_limits_at_the_sizes_of_deepseek_v3(entry: str, case: str, layout: str) -> None:
    how = CASES[entry]
    make = Maker(how.dtypes[-1], is_fake=True)
    call = how.cases[case](make, REAL[layout])
    with Watch() as watch:
        found = outcome(NATIVE, call, "npu")
    assert_same_form(found, outcome(REFERENCE, call, "cpu"))
    assert bool(watch.problems) == (case in NOT_DEEPSEEKS), watch.problems


@pytest.mark.parametrize("entry", list(CASES))
def test_native_entries_run_their_npu_ops(entry: str) -> None:
    how = CASES[entry]
    kind = "reference" if entry in REFERENCES else "native"
    assert NATIVE.names[entry].split()[0] == kind, f"{entry} is not {kind}: say why here, and what it runs"
    npusim.reset_calls()
    for case in how.cases.values():
        outcome(NATIVE, case(Maker(how.dtypes[-1]), TINY), "npu")
    ran = set(npusim.calls())
    assert how.npu_ops <= ran, f"{entry} claims {sorted(how.npu_ops)}, but {sorted(how.npu_ops - ran)} did not run"
