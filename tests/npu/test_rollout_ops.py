"""Every entry of vllm_ascend's table equals its reference, and a native one executes the torch_npu ops it claims."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.npu.kernel_limits import LIMITS, Watch
from tests.npu.op_parity import BF16, FP32, Maker, assert_same, assert_same_form, outcome, pairs
from tests.npu.rollout_op_cases import CASES, REAL, TINY
from vllm.ops.reference import rollout_ops as reference_ops
from vllm_ascend.ops import rollout_ops

npusim = pytest.importorskip("npusim", reason="needs the simulator: source tests/npu/env.sh")
NATIVE, REFERENCE = rollout_ops(), reference_ops()
RUNS_NO_KERNEL = ("experts_without_tokens", "router_of_softmax_scores")


@pytest.mark.parametrize("size", list(TINY))
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("entry", "case"), list(pairs(CASES)))
def test_native_equals_reference(entry: str, case: str, dtype: torch.dtype, size: str) -> None:
    how = CASES[entry]
    if dtype not in how.dtypes:
        pytest.skip(f"{entry} takes {how.dtypes} only")
    call = how.cases[case](Maker(dtype), TINY[size])
    assert_same(outcome(NATIVE, call, "npu"), outcome(REFERENCE, call, "cpu"), how.tolerance)


@pytest.mark.parametrize(("entry", "case"), list(pairs(CASES)))
def test_shapes_and_limits_at_the_sizes_of_deepseek_v3(entry: str, case: str) -> None:
    how = CASES[entry]
    call = how.cases[case](Maker(how.dtypes[-1], is_fake=True), REAL)
    with Watch() as watch:
        found = outcome(NATIVE, call, "npu")
    assert not watch.problems
    assert watch.seen or not how.npu_ops & LIMITS.keys() or case in RUNS_NO_KERNEL
    if how.output_like is not None:
        like = call.tensors[how.output_like]
        assert like is not None
        assert_same_form(found, {"output 0": like})
    else:
        assert_same_form(found, outcome(REFERENCE, call, "cpu"))


@pytest.mark.parametrize(("entry", "case"), [("topk_router", "router"), ("mla_decode", "decode")])
def test_sizes_outside_of_a_kernels_limits_are_noticed(entry: str, case: str) -> None:
    """8 experts in 4 groups; pages of 640 tokens."""
    how, size = CASES[entry], replace(REAL, experts=8, groups=4, kept_groups=2, choices=2, block_size=640)
    with Watch() as watch:
        outcome(NATIVE, how.cases[case](Maker(how.dtypes[-1], is_fake=True), size), "npu")
    assert "outside of its kernel's limits" in watch.problems[0]


@pytest.mark.parametrize("entry", list(CASES))
def test_native_entries_run_their_npu_ops(entry: str) -> None:
    how = CASES[entry]
    assert NATIVE.implementations[entry].split()[0] == "native", (
        f"{entry} is not native: say why here, and what it runs"
    )
    npusim.reset_calls()
    for case in how.cases.values():
        for size in TINY.values():
            outcome(NATIVE, case(Maker(how.dtypes[-1]), size), "npu")
    ran = set(npusim.calls())
    assert how.npu_ops <= ran, f"{entry} claims {sorted(how.npu_ops)}, but {sorted(how.npu_ops - ran)} did not run"
