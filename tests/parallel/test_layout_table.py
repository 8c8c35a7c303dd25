"""Layouts of the table give the loss, the norm and the gradients of one process."""

from __future__ import annotations

import pytest

from tests.parallel.layout_table import CASES, TOLERANCE, Case, compare

# Each part of a layout has one test in the default run. Here are those of which no other test of a model has the
# gradients; the others: test_layouts.py (TP, uneven PP, DP, EP, TP that extends EP, block recompute, the distributed
# optimizer), test_grpo_step.py, tests/megatron/test_context_parallel.py (CP in every form, alone, with TP and with EP,
# also of grouped heads; full and selective recompute), test_schedule_interleaved.py (VPP, four stages),
# test_moe_layouts.py (ETP beside EP, the dispatchers), tests/mindspeed_llm/test_layout_parity.py (tied embeddings).
DEFAULT = {
    "deepseek_v3, TP2 ETP2",
    "deepseek_v3, PP2, no-op layers 0,9",
    "deepseek_v3 with MTP, CP2",
    "qwen3, TP2 PP2 VPP2",
    "deepseek_v3 with MTP, TP2 PP2, down-projections split",
}


def of(num_ranks: int) -> list[Case]:
    return [case for case in CASES if case.layout.world_size == num_ranks]


def check(cases: list[Case], **settings: int) -> None:
    off = {case.name: difference for case, difference in compare(cases, **settings) if not difference.is_exact}
    assert not off, f"not within {TOLERANCE:g} of one process: {off}"


@pytest.mark.parametrize(
    "cases",
    [of(1), *([case for case in of(size) if case.name in DEFAULT] for size in (2, 4))],
    ids=["1", "some of 2", "some of 4"],
)
def test_layouts_equal_one_process(cases: list[Case]) -> None:
    check(cases, num_micro_batches=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_all_layouts_equal_one_process(num_ranks: int) -> None:
    cases = of(num_ranks)
    check(cases)


def test_the_layouts_of_the_default_run_are_in_the_table() -> None:
    assert {case.name for case in CASES} > DEFAULT
