"""Layouts of the table give the loss, the norm and the gradients of one process."""

from __future__ import annotations

import pytest

from tests.parallel.layout_table import CASES, TOLERANCE, Case, compare

# Layouts of two ranks whose every property another layout of the default run has, too: each axis alone beside the same
# axis with more to it, on two ranks or on four.
REPEATED = {
    "deepseek_v3, TP2",
    "deepseek_v3, PP2",
    "deepseek_v3, PP2, last stage 3",
    "deepseek_v3, PP2 VPP2",
    "deepseek_v3, CP2",
    "deepseek_v3, DP2",
    "deepseek_v3, DP2 EP2",
    "deepseek_v3, TP2, down-projections split",
    "qwen3, TP2",
    "qwen3, tied, TP2",
    "qwen3, tied, PP2",
    "deepseek_v3 with MTP, TP2 EP2",
}


def of(num_ranks: int) -> list[Case]:
    return [case for case in CASES if case.layout.world_size == num_ranks]


def check(cases: list[Case], **settings: int) -> None:
    off = {case.name: difference for case, difference in compare(cases, **settings) if not difference.is_exact}
    assert not off, f"not within {TOLERANCE:g} of one process: {off}"


@pytest.mark.parametrize(
    "cases",
    [of(1), [case for case in of(2) if case.name not in REPEATED], of(4)[::4]],
    ids=["1", "some of 2", "some of 4"],
)
def test_layouts_equal_one_process(cases: list[Case]) -> None:
    check(cases, num_micro_batches=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_all_layouts_equal_one_process(num_ranks: int) -> None:
    cases = of(num_ranks)
    assert num_ranks != 2 or {case.name for case in cases} > REPEATED
    check(cases)
