"""Memory for a step's large results: pieces never overlap, and what is free is in one piece again."""

from __future__ import annotations

import random
from itertools import pairwise

import torch

from vllm.ops.cpu.memory import StepMemory

MIB = 2**20


def addresses(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def test_pieces_are_whole_and_apart_whatever_the_order() -> None:
    memory, rng = StepMemory(), random.Random(0)
    held: list[tuple[torch.Tensor, float]] = []
    for value in range(400):
        if held and rng.random() < 0.5:
            tensor, expected = held.pop(rng.randrange(len(held)))
            assert (tensor == expected).all()
            del tensor
            continue
        shape = (rng.randrange(1, 600), rng.randrange(1, 2000))
        tensor = memory.empty(*shape, dtype=rng.choice([torch.bfloat16, torch.float32])).fill_(value % 256)
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        held.append((tensor, float(value % 256)))
    spans = sorted(addresses(tensor) for tensor, _ in held)
    assert len(spans) > 20
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_view_keeps_its_piece_and_what_is_free_comes_first() -> None:
    memory = StepMemory()
    first = memory.empty(MIB, dtype=torch.float32)
    begin, view = first.data_ptr(), first[:4].view(2, 2)
    del first
    second = memory.empty(MIB, dtype=torch.float32)
    assert second.data_ptr() >= begin + 4 * MIB
    del view
    # Joined with what is behind it once that is free too.
    assert memory.empty(MIB, dtype=torch.float32).data_ptr() == begin
    del second
    assert memory.empty(2 * MIB, dtype=torch.float32).data_ptr() == begin


def test_more_than_a_segment_and_release() -> None:
    memory = StepMemory()
    large = memory.empty(100, MIB, dtype=torch.uint8)
    small = memory.empty(2, MIB, dtype=torch.uint8).fill_(7)
    assert not addresses(large)[0] <= small.data_ptr() < addresses(large)[1]
    del large
    memory.release()  # of the one that is free
    assert (small == 7).all()
    assert memory.empty(100, MIB, dtype=torch.uint8).fill_(1).sum() == 100 * MIB
