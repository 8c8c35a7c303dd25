"""Memory at the borders of a phase, by the counts of torch_npu's own allocator over the fake driver."""

from __future__ import annotations

import pytest

from tests.npu.processes import output_of

MEASURE = """
    import torch
    from vllm.platforms import resolve_platform

    torch.npu.set_device(0)
    MB = 1 << 20
    def free(): return torch.npu.mem_get_info()[0]
    def mapped(): return torch.npu.memory_reserved()

    tensors = [torch.empty(64 * MB, dtype=torch.uint8, device="npu") for _ in range(8)]
    kept, full = tensors[3], free()
    del tensors  # one phase has ended, with a hole on either side of what stays
    freed_by_del = free() - full
    resolve_platform("npu").empty_cache()
    freed, left = free() - full, mapped()
    larger = torch.empty(300 * MB, dtype=torch.uint8, device="npu")  # the next phase, larger than any hole
    print(freed_by_del // MB, freed // MB, left // MB, (free() - full) // MB)
"""


def measure(allocator: str) -> list[int]:
    """In MB: freed by the end of the phase, freed at its border, still mapped, free again beside the next phase."""
    return [int(number) for number in output_of(MEASURE, timeout_s=150, PYTORCH_NPU_ALLOC_CONF=allocator).split()]


BUDGET = """
    import torch
    from vllm.platforms import resolve_platform

    platform, device = resolve_platform("npu"), torch.device("npu:0")
    torch.npu.set_device(device)
    torch.ones(1, device=device)
    before = platform.kv_cache_budget_bytes(device, 1.0)
    weights = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    del weights
    platform.empty_cache()
    print(before >> 20, platform.kv_cache_budget_bytes(device, 1.0) >> 20)
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_the_kv_cache_may_use_what_the_training_weights_had(expandable: bool) -> None:
    before, after = output_of(BUDGET, PYTORCH_NPU_ALLOC_CONF=f"expandable_segments:{expandable}").split()
    assert int(before) - int(after) < 32


def test_the_driver_gets_the_memory_back_without_expandable_segments() -> None:
    freed_by_del, freed, mapped, beside_next = measure("expandable_segments:False")
    assert freed_by_del == 0
    assert freed >= 400  # mem_get_info grows back
    assert mapped <= 128
    assert beside_next >= freed - 320


def test_expandable_segments_are_unmapped_and_their_memory_serves_the_next_phase() -> None:
    freed_by_del, freed, mapped, beside_next = measure("expandable_segments:True")
    assert (freed_by_del, freed) == (0, 0)  # the physical memory stays with the process
    assert mapped <= 128
    assert beside_next >= 0  # 300 MB more, and not one byte of it from the driver
