"""Attention with values narrower than keys, padded and as they are: the same results; what old CANN refuses."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed.ops import train_ops
from tests.npu.op_parity import BF16, FP32, Maker, assert_same, outcome
from tests.npu.processes import output_of
from tests.npu.train_op_cases import CASES, TINY

npusim = pytest.importorskip("npusim", reason="needs the simulator: source tests/npu/env.sh")
PADDED, AS_THEY_ARE = train_ops(), train_ops(mla_fa_without_pad=True)
WIDER_KEYS = [
    ("core_attention", "attention"),
    ("core_attention", "full_attention"),
    ("attention_block", "causal_block"),
    ("attention_block", "block_of_shared_heads"),
    ("attention_block_grad", "causal_block_grad"),
    ("attention_block_grad", "block_grad_of_shared_heads"),
]
OLD_CANN = {"FAKE_NPU_CANN": "8.2.RC1"}
# Runs one case, and prints what the kernel says if it refuses the call.
RUN = """
from tests.npu.op_parity import FP32, Maker, assert_same, outcome
{imports}
call = {case}
try:
    found = outcome({table}, call, "npu")
except RuntimeError as refused:
    print("refused:", refused)
else:
    assert_same(found, outcome({reference}(), call, "cpu"), {{FP32: 1e-5}})
    print("equal")
"""
TRAINING: dict[str, Any] = {
    "imports": "from mindspeed.ops import train_ops\n"
    "from megatron.core.ops import reference_ops\n"
    "from tests.npu.train_op_cases import TINY, attention",
    "case": "attention(Maker(FP32), TINY)",
    "reference": "reference_ops",
}
PREFILL: dict[str, Any] = {
    "imports": "from vllm_ascend.ops import rollout_ops\n"
    "from vllm.ops.reference import rollout_ops as reference_ops\n"
    "from tests.npu.rollout_op_cases import SMALL, prefill",
    "case": "prefill(Maker(FP32), SMALL)",
    "reference": "reference_ops",
}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("entry", "case"), WIDER_KEYS, ids=[case for _, case in WIDER_KEYS])
def test_outputs_and_gradients_are_the_same_without_padding(entry: str, case: str, dtype: Any) -> None:
    call = CASES[entry].cases[case](Maker(dtype), TINY)
    padded = outcome(PADDED, call, "npu")
    npusim.reset_calls()
    found = outcome(AS_THEY_ARE, call, "npu")
    assert "aten::constant_pad_nd" not in npusim.calls()
    assert len(found) > 1
    assert_same(found, padded, {FP32: 1e-6, BF16: 1e-2})


def test_the_printed_table_names_the_form() -> None:
    names = {entry: AS_THEY_ARE.names[entry] for entry, _ in WIDER_KEYS}
    assert set(names.values()) == {"native (without padding)"}
    assert {PADDED.names[entry] for entry in names} == {"native"}


def test_training_pads_values_for_a_cann_that_wants_one_head_size() -> None:
    assert output_of(RUN.format(table="train_ops()", **TRAINING), **OLD_CANN) == "equal"
    without = output_of(RUN.format(table="train_ops(mla_fa_without_pad=True)", **TRAINING), **OLD_CANN)
    assert without.startswith("refused:") and "v's head size 16 beside q's 24" in without


def test_prefill_pads_values_for_a_cann_that_wants_one_head_size() -> None:
    assert output_of(RUN.format(table="rollout_ops()", **PREFILL), **OLD_CANN) == "equal"
