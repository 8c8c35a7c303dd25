"""Weights loaded into the training model in any layout come out under HF names bit for bit, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.ops.reference import reference_ops
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from mindspeed_llm import convert_ckpt_deepseek3
from mindspeed_llm.hf_config import load_hf_config, parse_hf_config
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import always_fp32, hf_tensors, local_plan
from mindspeed_llm.weights import HFCheckpoint, ShardedCheckpoint, export_weights, load_weights, save_hf_checkpoint
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks


def load_and_export(paths: dict[str, str], sizes: dict[str, Any], bucket_bytes: int, dtype_name: str) -> list[str]:
    """Names whose exported tensor differs from the checkpoint's, then the order of the names."""
    hf = load_hf_config(paths["hf"])
    dtype = getattr(torch, dtype_name)
    groups = initialize_model_parallel(**sizes)
    model = build_model(hf, groups, reference_ops(), params_dtype=dtype)
    source = ShardedCheckpoint(paths["shards"]) if "shards" in paths else HFCheckpoint(paths["hf"])
    plan = local_plan(hf, groups.layout, groups.coords, "core")
    read = load_weights(model, plan, source)
    assert read == {piece.hf_name for tensor in plan for piece in tensor.pieces}
    reference = HFCheckpoint(paths["hf"])
    names, wrong = [], []
    for name, tensor in export_weights(model, hf, groups.layout, groups, bucket_bytes):
        names.append(name)
        expected = reference.read(name).to(torch.float32 if always_fp32(name) else dtype)
        if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
            wrong.append(name)
    assert names == list(hf_tensors(hf))
    tensors = export_weights(model, hf, groups.layout, groups, bucket_bytes, dtype=torch.bfloat16)
    save_hf_checkpoint(tensors, paths["out"], paths["hf"], max_shard_bytes=100_000, is_writer=groups.rank == 0)
    destroy_model_parallel()
    return wrong


LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one": (1, {}, 1 << 20),
    "dp2 ep2": (2, {"expert_model_parallel_size": 2}, 20_000),
    "tp2 pp2 ep2 uneven": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "num_layer_list": (2, 1),
        },
        50_000,
    ),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_export_returns_what_was_loaded(case: tuple[int, dict[str, Any], int], tmp_path: Path) -> None:
    world_size, sizes, bucket_bytes = case
    weights = write_tiny_checkpoint(tmp_path / "hf")
    paths = {"hf": str(tmp_path / "hf"), "out": str(tmp_path / "out")}
    results = run_ranks(load_and_export, world_size, paths, sizes, bucket_bytes, "float32", timeout_s=60)
    assert results == [[]] * world_size
    with HFCheckpoint(tmp_path / "out") as saved:
        for name, tensor in weights.items():
            expected = tensor if always_fp32(name) else tensor.bfloat16()
            assert torch.equal(saved.read(name), expected), name


def test_loading_shards_of_another_layout_in_bf16(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "hf", tiny_hf_config(q_lora_rank=None), dtype=torch.bfloat16)
    paths = {name: str(tmp_path / name) for name in ("hf", "out", "shards")}
    flags = ["--target-tensor-parallel-size", "4", "--target-pipeline-parallel-size", "3", "--moe-grouped-gemm"]
    assert convert_ckpt_deepseek3.main(["--load-dir", paths["hf"], "--save-dir", paths["shards"], *flags]) == 0
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    assert run_ranks(load_and_export, 2, paths, sizes, 10_000, "bfloat16", timeout_s=60) == [[], []]


def mismatch_message(path: str) -> str:
    groups = initialize_model_parallel()
    model = build_model(load_hf_config(path), groups, reference_ops(), params_dtype=torch.float32)
    other = parse_hf_config(tiny_hf_config(num_hidden_layers=4, moe_intermediate_size=64))
    plan = local_plan(other, groups.layout, groups.coords, "core")
    with HFCheckpoint(path) as source, pytest.raises(ValueError, match="loading weights") as error:
        load_weights(model, plan, source)
    loaded = load_weights(model, local_plan(load_hf_config(path), groups.layout, groups.coords), HFCheckpoint(path))
    assert loaded == set(hf_tensors(load_hf_config(path)))
    destroy_model_parallel()
    return str(error.value)


def test_strict_loading_lists_the_differences(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "hf")
    [message] = run_ranks(mismatch_message, 1, str(tmp_path / "hf"), timeout_s=60)
    assert "the source has no model.layers.3." in message
    assert "more" in message
