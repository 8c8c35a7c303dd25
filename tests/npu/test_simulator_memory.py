"""Device memory has a limit, the allocator in front of it is torch_npu's own, and unwritten memory shows."""

from __future__ import annotations

import pytest
import torch
import torch_npu

from tests.npu.device_memory import held_bytes
from tests.npu.processes import output_of

MIB = 1 << 20

LIMITED = """
import torch
from torch import npu
MIB = 1 << 20
def held(): return npu.memory_allocated() // MIB, npu.memory_reserved() // MIB, npu.mem_get_info()[0] // MIB
assert npu.mem_get_info() == (256 * MIB, 256 * MIB)
block = torch.empty(100 * MIB, dtype=torch.uint8, device="npu")
assert npu.memory_allocated() // MIB == 100 and 256 - npu.mem_get_info()[0] // MIB == npu.memory_reserved() // MIB
try:
    torch.empty(200 * MIB, dtype=torch.uint8, device="npu")
    raise SystemExit("more memory than there is")
except torch.OutOfMemoryError as error:
    assert "Tried to allocate 202" in str(error) or "Tried to allocate 200" in str(error), error
assert npu.memory_stats()["num_ooms"] == 1
other = torch.empty(200 * MIB, dtype=torch.uint8, device="npu:1")
del block
assert held()[0] == 0 and held()[1] >= 100
npu.empty_cache()
assert held() == (0, 0, 256), held()
assert npu.max_memory_allocated() // MIB == 100
npu.reset_peak_memory_stats()
assert npu.max_memory_allocated() == 0
again = torch.empty(200 * MIB, dtype=torch.uint8, device="npu")
assert npu.memory_allocated() // MIB == 200
assert int(again.fill_(3)[-1]) == 3
"""

# Physical memory is mapped where it is needed, so what lies between two blocks and what was never used make one block.
VIRTUAL = """
del again
blocks = [torch.empty(60 * MIB, dtype=torch.uint8, device="npu") for _ in range(3)]
blocks[1].fill_(2)
blocks[0] = blocks[2] = None
big = torch.empty(140 * MIB, dtype=torch.uint8, device="npu")
assert int(big.fill_(3)[-1]) == 3 and int(blocks[1].min()) == 2
del big, blocks
npu.empty_cache()
npu.empty_virt_addr_cache()
assert held() == (0, 0, 256), held()
assert torch.ones(3, device="npu").sum().item() == 3
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_the_limit_and_the_statistics(expandable: bool) -> None:
    code = LIMITED + (VIRTUAL if expandable else "")
    output_of(code, FAKE_NPU_MEM_GB="0.25", PYTORCH_NPU_ALLOC_CONF=f"expandable_segments:{expandable}")


def test_unwritten_memory_shows() -> None:
    assert bool(torch.empty(64, device="npu").isnan().all())
    assert bool(torch.empty(64, device="npu", dtype=torch.bfloat16).isnan().all())
    assert set(torch.empty(64, device="npu", dtype=torch.int64).tolist()) == {-1}
    assert bool(torch.empty_like(torch.ones(8, device="npu")).isnan().all())


def test_a_storage_can_be_given_up_and_made_again() -> None:
    tensor = torch.arange(float(MIB), device="npu")
    storage, size, before = tensor.untyped_storage(), tensor.untyped_storage().nbytes(), held_bytes()
    storage.resize_(0)
    assert before - held_bytes() >= size
    storage.resize_(size)
    assert held_bytes() == before
    assert bool(tensor.isnan().all())  # its values are gone, whatever block it got
    tensor.copy_(torch.arange(float(MIB)))
    assert tensor[-1].item() == MIB - 1


def test_private_formats_are_remembered_and_hold_the_values() -> None:
    """The bytes stay in plain order: what is simulated is the format's bookkeeping, not its layout."""
    torch.npu.config.allow_internal_format = True
    try:
        plain = torch.randn(40, 48).to("npu", torch.bfloat16)
        nz = torch_npu.npu_format_cast(plain, 29)
        assert (int(torch_npu.get_npu_format(plain)), int(torch_npu.get_npu_format(nz))) == (2, 29)
        assert torch.equal(nz.cpu(), plain.cpu()) and torch.equal((nz @ nz.T).cpu(), (plain @ plain.T).cpu())
        back = torch_npu.npu_format_cast(nz, 2)
        assert int(torch_npu.get_npu_format(back)) == 2 and torch.equal(back.cpu(), plain.cpu())
        in_place = plain.clone()
        torch_npu.npu_format_cast_(in_place, 29)
        assert int(torch_npu.get_npu_format(in_place)) == 29 and torch.equal(in_place.cpu(), plain.cpu())
    finally:
        torch.npu.config.allow_internal_format = False
