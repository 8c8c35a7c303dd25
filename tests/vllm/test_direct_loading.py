"""A rank reads the bytes of a checkpoint that it holds and no others; damage is named with its tensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_formats.fp8 import FP8_DTYPE, SCALE_SUFFIX, Fp8Weight, num_blocks
from tests.parallel.launcher import run_ranks
from tests.vllm.fp8_tiny import WIDE, fp8_tensors, write_directory
from tests.vllm.test_lifecycle import build
from tests.vllm.test_update_weights import digests
from tests.vllm.tiny import random_weights
from vllm.model_executor.model_loader.checkpoint_reader import CheckpointReader
from vllm.model_executor.model_loader.digest import differences
from vllm.model_executor.model_loader.weight_view import WeightView

# Columns that are cut leave a page or more between the rows of a rank.
BROAD = WIDE | {
    "intermediate_size": 8320,
    "moe_intermediate_size": 4160,
    "n_shared_experts": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "v_head_dim": 2144,
}


def broad_weights() -> dict[str, Tensor]:
    """bf16; what routes is fp32, as engines hold it."""
    return {
        name: weight if ".mlp.gate." in name else weight.bfloat16() for name, weight in random_weights(BROAD, 0).items()
    }


def shard_bytes(view: WeightView, is_fp8: bool, itemsize: int) -> int:
    """Bytes of a rank's shard in the file; an FP8 weight has a scale for each block that the shard touches."""
    if view.parameter is None:
        return 0
    sizes = [stop - start for start, stop in view.ranges]
    num_scales = [num_blocks(stop) - start // 128 for start, stop in view.ranges]
    return torch.Size(sizes).numel() * (1 if is_fp8 else itemsize) + 4 * is_fp8 * torch.Size(num_scales).numel()


def read_again(paths: list[str], quantizations: list[str], layout: dict[str, Any]) -> list[tuple[Any, int, int]]:
    """For each engine its digests, the bytes that its weights take in the files, the bytes that a load reads."""
    results = []
    for path, quantization in zip(paths, quantizations, strict=True):
        llm = build(path, dtype="bfloat16", quantization=quantization, **layout)
        model = llm.core.worker.model
        views, reader = model.weight_views, CheckpointReader(path)
        wanted = 0
        for name, weight in reader.weights(lambda name: True):
            is_fp8 = isinstance(weight, Fp8Weight)
            wanted += shard_bytes(views[name], is_fp8, 1 if is_fp8 else weight.dtype.itemsize)
        assert reader.bytes_read == 0
        model.load_weights(reader.weights(lambda name, of=views: of[name].parameter is not None))
        results.append((llm.weights_digest(), wanted, reader.bytes_read))
        llm.shutdown()
    return results


def test_each_rank_reads_what_it_holds(tmp_path: Path) -> None:
    plain = broad_weights()
    stored = fp8_tensors(plain)
    in_fp8 = write_directory(tmp_path / "fp8", stored, config=BROAD)
    in_bf16 = write_directory(tmp_path / "bf16", plain, config=BROAD)
    paths, quantizations = [in_fp8, in_fp8, in_bf16], ["fp8", "dequantize", "fp8"]
    layout = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    size = sum(tensor.nbytes for tensor in stored.values())
    for kept, multiplied_out, quantised in run_ranks(read_again, 2, paths, quantizations, layout):
        for _, wanted, read in (kept, multiplied_out):
            assert wanted <= read < 1.001 * wanted < 0.6 * size  # scales in between are read through
        # Quantised on the way: the blocks that a slice touches are read whole.
        assert quantised[1] <= quantised[2] < 1.05 * quantised[1]
        for found, _, _ in (kept, quantised):
            assert not differences(digests(stored), found)


def test_damage_is_named_with_its_tensors(tmp_path: Path) -> None:
    stored = fp8_tensors(random_weights(WIDE, 0))
    path = write_directory(tmp_path, stored, shards=3)
    first, second, third = sorted(tmp_path.glob("*.safetensors"))
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    lost = "model.layers.0.lost.weight"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": index["weight_map"] | {lost: third.name}}))
    os.truncate(first, first.stat().st_size - 1)
    held = [name for name, file in index["weight_map"].items() if file == second.name]
    second.unlink()
    with pytest.raises(ValueError, match=f"{first.name} is truncated: .* it should hold ") as error:
        build(path)
    assert f"{second.name} is missing; it should hold {len(held)} tensors: {held[0]}, " in str(error.value)
    assert f"{third.name} does not hold {lost}" in str(error.value)


def test_fp8_without_scales_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    stored = fp8_tensors(random_weights(WIDE, 0))
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype == FP8_DTYPE
    del stored["model.layers.0.self_attn.o_proj.weight" + SCALE_SUFFIX]
    stored["model.layers.1.mlp.gate.weight" + SCALE_SUFFIX] = torch.ones(1, 1)
    with pytest.raises(ValueError, match="o_proj.weight has no .*o_proj.weight_scale_inv\n.*gate.* has no FP8 weight"):
        build(write_directory(tmp_path, stored))
