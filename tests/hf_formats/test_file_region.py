"""Any slice of a region of a file is read right, and no bytes outside of it are read."""

from __future__ import annotations

import itertools
import math
import os
import random
from pathlib import Path

import pytest
import torch

from hf_formats import file_region
from hf_formats.file_region import PAGE_BYTES, FileReader, FileRegion


@pytest.mark.parametrize("shape", [(), (7,), (9, 5), (6, 3000), (4, 5, 6), (3, 4, 2, 1500)], ids=str)
def test_every_kind_of_slice(shape: tuple[int, ...], tmp_path: Path) -> None:
    draw = random.Random(0)
    whole = torch.randn(shape).to(torch.bfloat16)
    (tmp_path / "file").write_bytes(b"before" + whole.view(-1).view(torch.uint8).numpy().tobytes() + b"after")
    region = FileRegion(tmp_path / "file", 6, shape, torch.bfloat16)
    reader = FileReader()
    assert reader.read("x", region).equal(whole) and reader.bytes_read == whole.nbytes
    for _ in range(40):
        ends = [sorted(draw.choices(range(size + 1), k=2)) for size in shape]
        ranges = tuple((0, size) if draw.random() < 0.3 else (a, b) for size, (a, b) in zip(shape, ends, strict=True))
        found = reader.read("x", region, ranges) if shape else reader.read("x", region)
        assert found.equal(whole[tuple(slice(*part) for part in ranges)]), ranges
    reader.close()


@pytest.mark.parametrize("width", [64, PAGE_BYTES, 3 * PAGE_BYTES])
def test_columns_are_read_alone_unless_their_pages_are_shared(width: int, tmp_path: Path) -> None:
    whole = torch.arange(50 * 2 * width, dtype=torch.int64).to(torch.uint8).view(50, 2 * width)
    (tmp_path / "file").write_bytes(whole.numpy().tobytes())
    region, reader = FileRegion(tmp_path / "file", 0, (50, 2 * width), torch.uint8), FileReader()
    assert reader.read("x", region, ((10, 40), (0, width))).equal(whole[10:40, :width])
    between = 0 if width >= PAGE_BYTES else 29 * width
    assert reader.bytes_read == 30 * width + between


def test_rows_read_through_a_small_stage(tmp_path: Path) -> None:
    """More rows than the stage holds at once."""
    rows = 2 * file_region._STAGE_BYTES // 1000 + 17
    whole = torch.randint(0, 255, (rows, 1000), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(whole.numpy().tobytes())
    region = FileRegion(tmp_path / "file", 0, (rows, 1000), torch.uint8)
    assert FileReader().read("x", region, ((5, rows), (300, 700))).equal(whole[5:, 300:700])


def test_a_file_that_shrinks_and_slices_outside(tmp_path: Path) -> None:
    file, reader = tmp_path / "file", FileReader()
    file.write_bytes(bytes(4400))
    a, b = FileRegion(file, 0, (1000,), torch.float32), FileRegion(file, 4000, (10, 10), torch.float32)
    for ranges in (((0, 1001),), ((-1, 4),), ((5, 4),), ((0, 3), (0, 3))):
        with pytest.raises(ValueError, match=r"a has shape \(1000,\); .* is no slice of it"):
            reader.read("a", a, ranges)
    os.truncate(file, 400)
    with pytest.raises(ValueError, match=r"file ends at byte 400, before the end of a: it is truncated"):
        reader.read("a", a)
    file.unlink()
    with pytest.raises(OSError, match=r"No such file or directory, while b was read from it: .*file"):
        FileReader().read("b", b)


def test_rows_of_every_rank_make_up_the_whole() -> None:
    """Blocks of rows are disjoint and leave nothing out, whatever is cut."""
    shape = (3, 4, 5)
    cuts = [((0, 1), (1, 3)), ((0, 2), (2, 4)), ((0, 5), (2, 4), (4, 5))]
    for ranges in itertools.product(*cuts):
        out = torch.empty([b - a for a, b in ranges], dtype=torch.uint8)
        blocks = list(file_region._blocks_of_rows(shape, ranges, 1, out))
        starts = {start + row * stride + byte for start, stride, rows in blocks for row in range(len(rows))
                  for byte in range(rows.shape[1])}  # fmt: skip
        expected = {
            int(i) for i in torch.arange(math.prod(shape)).view(shape)[tuple(slice(*p) for p in ranges)].flatten()
        }
        assert starts == expected
