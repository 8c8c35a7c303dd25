"""Every layout of the table gives the loss, the norm and the gradients of one process."""

from __future__ import annotations

import pytest

from tests.parallel.layout_table import CASES, TOLERANCE, compare


@pytest.mark.parametrize("num_ranks", sorted({case.layout.world_size for case in CASES}))
def test_layouts_equal_one_process(num_ranks: int) -> None:
    cases = [case for case in CASES if case.layout.world_size == num_ranks]
    off = {case.name: difference for case, difference in compare(cases) if not difference.is_exact}
    assert not off, f"not within {TOLERANCE:g} of one process: {off}"
