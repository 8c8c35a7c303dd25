"""What is written has the right form and the same bytes by every way: FP8 at once, other layouts, workers, kernels."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_formats.fp8 import dequantize, is_quantized, quantize
from mindspeed_llm import fp8_cast_bf16, fp8_quantize
from mindspeed_llm.conversion.engine import RunOptions, convert
from mindspeed_llm.conversion.kernels import copy_native, crc32_native
from mindspeed_llm.conversion.torch_file import TensorRef, torch_file_layout
from mindspeed_llm.conversion.writer import StoredTensor
from mindspeed_llm.convert_ckpt_deepseek3 import plan_shards
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.sharded_checkpoint import shard_layout, torch_file_regions
from mindspeed_llm.weight_plan import TensorPlan
from mindspeed_llm.weight_source import copy_values
from tests.compiler import needs_c_compiler
from tests.mindspeed_llm.test_conversion import EXTENDED, GROUPED, assert_same_bytes, shard, sizes, unshard
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint

CONFIG = tiny_hf_config(hidden_size=192, moe_intermediate_size=160, torch_dtype="bfloat16", num_nextn_predict_layers=1)


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """The published form of a BF16 checkpoint in ``base``, with blocks that no layout cuts on their edges."""
    write_tiny_checkpoint(tmp_path / "base", CONFIG)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    assert fp8_quantize.quantize_checkpoint(tmp_path / "base", tmp_path / "fp8")
    return tmp_path / "fp8"


def cast(source: Path, target: Path, *flags: str) -> int:
    paths = ["--input-fp8-hf-path", str(source), "--output-bf16-hf-path", str(target)]
    return fp8_cast_bf16.main([*paths, *flags])


def same_files(left: Path, right: Path, pattern: str) -> bool:
    names = sorted(str(path.relative_to(left)) for path in left.rglob(pattern))
    others = sorted(str(path.relative_to(right)) for path in right.rglob(pattern))
    return bool(names) and names == others and all((left / n).read_bytes() == (right / n).read_bytes() for n in names)


@pytest.mark.parametrize("flags", [[*sizes(4, 3, 2), *EXTENDED], [*sizes(2, 1, 2), *GROUPED], sizes(2, 3, 4)])
def test_fp8_goes_to_shards_as_through_bf16(fp8: Path, flags: list[str], tmp_path: Path) -> None:
    mtp = ["--num-nextn-predict-layers", "1"]
    assert cast(fp8, tmp_path / "bf16", *mtp) == 0
    assert shard(tmp_path / "bf16", tmp_path / "twice", *flags, *mtp) == 0
    assert shard(fp8, tmp_path / "once", *flags, *mtp) == 0
    assert same_files(tmp_path / "once", tmp_path / "twice", "*.pt")


def test_layout_to_layout_is_as_from_hf(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "hf", CONFIG)
    mtp = ["--num-nextn-predict-layers", "1"]
    first, second = [*sizes(2, 3, 2), *EXTENDED, *mtp], [*sizes(4, 1, 4), *GROUPED, *mtp]
    assert shard(tmp_path / "hf", tmp_path / "first", *first) == 0
    assert shard(tmp_path / "hf", tmp_path / "second", *second) == 0
    assert shard(tmp_path / "first", tmp_path / "through", *second) == 0
    assert same_files(tmp_path / "through", tmp_path / "second", "*.pt")
    assert shard(tmp_path / "first", tmp_path / "fewer", *sizes(1, 1, 2), *GROUPED) == 0  # without the MTP module
    assert shard(tmp_path / "fewer", tmp_path / "more", *second) == 1


def test_shards_to_fp8_quantise_once(fp8: Path, tmp_path: Path) -> None:
    assert shard(tmp_path / "base", tmp_path / "shards", *sizes(2, 3, 2), *EXTENDED) == 0
    assert unshard(tmp_path / "shards", tmp_path / "back", tmp_path / "base", "--fp8") == 0
    assert cast(tmp_path / "back", tmp_path / "bf16") == 0
    with HFCheckpoint(tmp_path / "base") as base, HFCheckpoint(tmp_path / "bf16") as again:
        for name in again.names():
            weight = base.read(name)
            expected = dequantize(quantize(weight)) if is_quantized(name) else weight
            assert torch.equal(again.read(name), expected), name
    with HFCheckpoint(tmp_path / "back") as back, HFCheckpoint(fp8) as published:
        assert all(
            torch.equal(back.read(n).view(torch.uint8), published.read(n).view(torch.uint8)) for n in back.names()
        )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_workers_kernels_and_memory_change_no_byte(fp8: Path, tmp_path: Path) -> None:
    assert cast(fp8, tmp_path / "one", "--max-shard-bytes", "300000") == 0
    assert cast(fp8, tmp_path / "torch", "--max-shard-bytes", "300000", "--kernels", "torch") == 0
    assert cast(fp8, tmp_path / "two", "--max-shard-bytes", "300000", "--workers", "2", "--max-memory", "1") == 0
    assert_same_bytes(tmp_path / "one", tmp_path / "torch")
    assert_same_bytes(tmp_path / "one", tmp_path / "two")


@needs_c_compiler
@pytest.mark.parametrize("is_turned", [False, True])
def test_native_loops_give_torchs_bits(is_turned: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(300, 2)[:, :333].contiguous()
    codes[(codes & 0x7F) == 0x7F] = 0  # not numbers: compared below
    weight = codes.view(torch.float8_e4m3fn)
    scale = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-30, 1e-3, 1.0, 1e30])
    origin, part = (100, 60), weight[:290]
    expected, found = torch.zeros(290, 333).bfloat16(), torch.zeros(333, 290).bfloat16().T
    if not is_turned:
        found = torch.zeros(290, 333).bfloat16()
    copy_values(expected, part, scale, origin)
    copy_native(found, part, scale, origin)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    by_hand = part.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[100:390, 60:393]
    assert torch.equal(expected, by_hand.bfloat16())
    copy_native(found, expected, None, (0, 0))
    assert torch.equal(found, expected)
    nan = torch.tensor([[0x7F, 0xFF, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = torch.zeros(1, 3).bfloat16()
    copy_native(out, nan, torch.ones(1, 1), (0, 0))
    assert out.isnan().tolist() == [[True, True, False]]


@needs_c_compiler
def test_native_checksum_is_zlibs() -> None:
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy().data
    for start, stop in ((0, 0), (0, 5), (3, 66), (1, 64 + 1), (0, 79), (7, 4999), (0, 4096)):
        for so_far in (0, 1, 0xDEADBEEF):
            assert crc32_native(data[start:stop], so_far) == zlib.crc32(data[start:stop], so_far)


class Given:
    """Slabs of one tensor that is there already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        self.crc32 = zlib.crc32(raw)
        self._raw = memoryview(raw.data)

    def __iter__(self) -> Iterator[memoryview]:
        yield self._raw


def test_files_are_as_torch_save_writes_them(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.arange(4)}
    stored = [
        StoredTensor(name, tuple(tensor.shape), tensor.dtype, TensorPlan(name, tuple(tensor.shape), "", ()))
        for name, tensor in tensors.items()
    ]
    refs = {tensor.name: TensorRef(key, tensor.shape, tensor.dtype) for key, tensor in enumerate(stored)}
    layout = torch_file_layout({"model": refs, "iteration": 1}, stored, "archive")
    file = tmp_path / "file.pt"
    with file.open("w+b") as stream:
        offsets = layout.write(stream, lambda tensor: Given(tensors[tensor.name]))
    assert file.stat().st_size == layout.num_bytes
    assert all(offset % 64 == 0 for offset in offsets.values())
    assert zipfile.ZipFile(file).testzip() is None
    for options in ({}, {"mmap": True}):
        content = torch.load(file, weights_only=True, **options)
        assert content["iteration"] == 1
        assert all(torch.equal(content["model"][name], tensor) for name, tensor in tensors.items())
    regions = torch_file_regions(file)
    assert {name: region.offset for (_, name), region in regions.items()} == offsets
    torch.save({"model": tensors}, file)
    assert {region.shape for region in torch_file_regions(file).values()} == {(3, 5), (7,), (4,)}


def test_verify_names_what_is_damaged(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*sizes(1, 3, 2), *GROUPED]
    out = tmp_path / "out"
    assert shard(fp8, out, *flags) == 0
    assert shard(fp8, out, *flags, "--verify") == 0
    assert "is whole" in capsys.readouterr().out
    files = sorted(out.rglob("*.pt"))
    name = "decoder.layers.0.mlp.experts.weight2"
    offset = torch_file_regions(files[5])["model", name].offset
    for file, place_of_flip in ((files[5], offset + 77), (files[4], 3), (out / "layout.json", 5)):
        content = bytearray(file.read_bytes())
        content[place_of_flip] ^= 4
        file.write_bytes(content)
    os.truncate(files[3], files[3].stat().st_size // 2)
    files[2].unlink()
    assert shard(fp8, out, *flags, "--verify") == 1
    told = capsys.readouterr().err
    assert f"mp_rank_00_002_001/model_optim_rng.pt: {name} is damaged" in told
    assert "mp_rank_00_002_000/model_optim_rng.pt is damaged between its tensors" in told
    assert "mp_rank_00_001_001/model_optim_rng.pt has" in told
    assert "truncated, which cuts" in told
    assert "mp_rank_00_001_000/model_optim_rng.pt is missing, with 14 tensors: decoder.layers.0.input_layernorm" in told
    assert "layout.json is damaged" in told
    assert told.count("\n  - ") == 5
    assert unshard(tmp_path / "fp8", tmp_path / "x", fp8, "--verify") == 1
    assert "nothing to verify" in capsys.readouterr().err


def test_dry_run_needs_a_config_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_checkpoint(tmp_path / "hf", CONFIG)
    flags = [*sizes(2, 3, 4), *EXTENDED]
    assert shard(tmp_path / "hf", tmp_path / "out", *flags, "--dry-run") == 0
    with_weights = capsys.readouterr().out
    for file in (tmp_path / "hf").glob("*.safetensors*"):
        file.unlink()
    assert shard(tmp_path / "hf", tmp_path / "out", *flags, "--dry-run") == 0
    without = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    write_tiny_checkpoint(tmp_path / "hf", CONFIG)
    assert shard(tmp_path / "hf", tmp_path / "out", *flags) == 0
    written = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*.pt"))
    for said in (with_weights, without):
        assert f"bytes          {written:,}" in said
        assert "files          24" in said
    assert shard(tmp_path / "nowhere", tmp_path / "out", *flags, "--dry-run") == 1


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config(vocab_size=10**12, torch_dtype="float32")))
    layout = shard_layout(1, 1, 1, tp_extend_ep=False)
    planned = plan_shards(tmp_path, layout, "mindspeed_llm", dry_run=True)
    with pytest.raises(ValueError, match=r"needs 512000\.0 GB more and its disk has"):
        convert(planned, tmp_path / "out", RunOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
