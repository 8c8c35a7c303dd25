"""Layouts of the table give the loss, the norm and the gradients of one process."""

from __future__ import annotations

import pytest

from tests.parallel.layout_table import CASES, TOLERANCE, Case, compare


def of(num_ranks: int) -> list[Case]:
    return [case for case in CASES if case.layout.world_size == num_ranks]


def check(cases: list[Case]) -> None:
    off = {case.name: difference for case, difference in compare(cases) if not difference.is_exact}
    assert not off, f"not within {TOLERANCE:g} of one process: {off}"


@pytest.mark.parametrize("cases", [of(1), of(2), of(4)[::4]], ids=["1", "2", "some of 4"])
def test_layouts_equal_one_process(cases: list[Case]) -> None:
    check(cases)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [4, 8, 16])
def test_layouts_of_many_ranks_equal_one_process(num_ranks: int) -> None:
    check(of(num_ranks))
