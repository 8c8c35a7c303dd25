"""Operations on a planned device return, the second time too, what the meta device returns without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tools.plan.collectives import CollectiveLog
from tools.plan.device import MemoryMeter, PlannedDevice

CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an integer and a float are different arguments": lambda x, y: (y.long() * 2, y.long() * 2.0),
    "matrix product": lambda x, y: x @ y.T,
    "sum in another type": lambda x, y: x.sum(-1, dtype=torch.float64),
    "several outputs": lambda x, y: x.float().topk(2),
    "list of inputs": lambda x, y: torch.cat([x, y], dim=1),
    "transposed": lambda x, y: (x.T + y.T).clamp(0, 1),
    "split": lambda x, y: torch.split(x + y, 2),
    "view of what was made": lambda x, y: (x + y).view(-1)[3:].unflatten(0, (-1, 3)),
    "copy in another layout": lambda x, y: x.T.contiguous().reshape(-1),
    "complex": lambda x, y: torch.complex(x.float(), y.float()).real,
}


def described(outputs: Any) -> list[tuple[Any, ...]]:
    tensors = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return [(x.shape, x.stride(), x.dtype, x.storage_offset(), x.untyped_storage().nbytes()) for x in tensors]


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_without_it(name: str) -> None:
    x, y = (torch.empty(4, 6, dtype=torch.bfloat16, device="meta") for _ in range(2))
    expected = described(CASES[name](x, y))
    with PlannedDevice(CollectiveLog(), MemoryMeter()):
        for _ in range(3):
            assert described(CASES[name](x, y)) == expected


def test_every_output_has_memory_of_its_own_and_writes_have_none() -> None:
    meter = MemoryMeter()
    with PlannedDevice(CollectiveLog(), meter):
        x = torch.zeros(256, device="meta")
        before = meter.now_bytes
        kept = [x.exp() for _ in range(3)]
        assert meter.now_bytes == before + 3 * 1024
        for _ in range(3):
            assert kept[0].mul_(2) is kept[0]
            assert kept[1].copy_(kept[0]) is kept[1]
        assert meter.now_bytes == before + 3 * 1024
        for _ in range(2):
            view = torch.ops.aten._unsafe_view(kept[2], [16, 16])  # torch says nothing of its sharing memory
            assert view.untyped_storage()._cdata == kept[2].untyped_storage()._cdata
        del kept, view
        assert meter.now_bytes == before
