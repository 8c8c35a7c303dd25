"""Rows that are taken several times: values and gradients are those of ``index_select``."""

import pytest
import torch

from megatron.core.shared_rows import TakenRows


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [3, 1], [2, 0, 2, 2, 1, 0], [1, 1, 1], []])
def test_values_and_gradients_are_those_of_index_select(index: list[int]) -> None:
    index_F = torch.tensor(index, dtype=torch.long)
    rows = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(len(index), 3, 2, dtype=torch.float64)
    taken = TakenRows.of(index_F, 4).take(rows)
    expected = rows.index_select(0, index_F)
    assert torch.equal(taken, expected)
    (mine,) = torch.autograd.grad((taken * upstream).sum(), rows)
    (theirs,) = torch.autograd.grad((expected * upstream).sum(), rows)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
