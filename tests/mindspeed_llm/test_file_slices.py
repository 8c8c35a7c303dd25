"""Any slice of an region in a file is read right, and the bytes beside it are not read."""

from __future__ import annotations

import itertools
import math
import os
import random
from pathlib import Path

import pytest
import torch

from mindspeed_llm import file_slices as training
from mindspeed_llm.file_slices import PAGE_BYTES, FileSlices, Region
from vllm.model_executor.model_loader import file_slices as rollout


def test_both_engines_hold_the_same_file() -> None:
    assert Path(training.__file__).read_bytes() == Path(rollout.__file__).read_bytes()


@pytest.mark.parametrize("shape", [(), (7,), (9, 5), (6, 3000), (4, 5, 6), (3, 4, 2, 1500)], ids=str)
def test_every_kind_of_slice(shape: tuple[int, ...], tmp_path: Path) -> None:
    draw = random.Random(0)
    whole = torch.randn(shape).to(torch.bfloat16)
    (tmp_path / "file").write_bytes(b"before" + whole.view(-1).view(torch.uint8).numpy().tobytes() + b"after")
    region = Region(tmp_path / "file", 6, shape, torch.bfloat16)
    slices = FileSlices()
    assert slices.read("x", region).equal(whole) and slices.bytes_read == whole.nbytes
    for _ in range(40):
        ends = [sorted(draw.choices(range(size + 1), k=2)) for size in shape]
        extent = tuple((0, size) if draw.random() < 0.3 else (a, b) for size, (a, b) in zip(shape, ends, strict=True))
        found = slices.read("x", region, extent) if shape else slices.read("x", region)
        assert found.equal(whole[tuple(slice(*part) for part in extent)]), extent
    slices.close()


@pytest.mark.parametrize("width", [64, PAGE_BYTES, 3 * PAGE_BYTES])
def test_columns_are_read_alone_unless_their_pages_are_shared(width: int, tmp_path: Path) -> None:
    whole = torch.arange(50 * 2 * width, dtype=torch.int64).to(torch.uint8).view(50, 2 * width)
    (tmp_path / "file").write_bytes(whole.numpy().tobytes())
    region, slices = Region(tmp_path / "file", 0, (50, 2 * width), torch.uint8), FileSlices()
    assert slices.read("x", region, ((10, 40), (0, width))).equal(whole[10:40, :width])
    between = 0 if width >= PAGE_BYTES else 29 * width
    assert slices.bytes_read == 30 * width + between


def test_rows_read_through_a_small_stage(tmp_path: Path) -> None:
    """More rows than the stage holds at once."""
    rows = 2 * training._STAGE_BYTES // 1000 + 17
    whole = torch.randint(0, 255, (rows, 1000), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(whole.numpy().tobytes())
    region = Region(tmp_path / "file", 0, (rows, 1000), torch.uint8)
    assert FileSlices().read("x", region, ((5, rows), (300, 700))).equal(whole[5:, 300:700])


def test_a_file_that_shrinks_and_slices_outside(tmp_path: Path) -> None:
    file, slices = tmp_path / "file", FileSlices()
    file.write_bytes(bytes(4400))
    a, b = Region(file, 0, (1000,), torch.float32), Region(file, 4000, (10, 10), torch.float32)
    for extent in (((0, 1001),), ((-1, 4),), ((5, 4),), ((0, 3), (0, 3))):
        with pytest.raises(ValueError, match=r"a has shape \(1000,\); .* is no slice of it"):
            slices.read("a", a, extent)
    os.truncate(file, 400)
    with pytest.raises(ValueError, match=r"file ends at byte 400, before the end of a: it is truncated"):
        slices.read("a", a)
    file.unlink()
    with pytest.raises(OSError, match=r"No such file or directory, while b was read from it: .*file"):
        FileSlices().read("b", b)


def test_rows_of_every_rank_make_up_the_whole() -> None:
    """Blocks of rows are disjoint and leave nothing out, whatever is cut."""
    shape = (3, 4, 5)
    cuts = [((0, 1), (1, 3)), ((0, 2), (2, 4)), ((0, 5), (2, 4), (4, 5))]
    for extent in itertools.product(*cuts):
        out = torch.empty([b - a for a, b in extent], dtype=torch.uint8)
        blocks = list(training._blocks_of_rows(shape, extent, 1, out))
        starts = {start + row * stride + byte for start, stride, rows in blocks for row in range(len(rows))
                  for byte in range(rows.shape[1])}  # fmt: skip
        expected = {
            int(i) for i in torch.arange(math.prod(shape)).view(shape)[tuple(slice(*p) for p in extent)].flatten()
        }
        assert starts == expected
