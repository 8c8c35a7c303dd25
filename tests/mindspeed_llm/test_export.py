"""Weights and gradients of the training model in any layout come out under HF names bit for bit, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_formats.config import load_hf_config, parse_hf_config
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.ops.reference import reference_ops
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import destroy_model_parallel, initialize_from_layout, initialize_model_parallel
from mindspeed_llm import convert_ckpt_deepseek3
from mindspeed_llm.export_weights import export_weights
from mindspeed_llm.hf_checkpoint import HFCheckpoint, save_hf_checkpoint
from mindspeed_llm.hf_shapes import always_fp32, hf_tensors
from mindspeed_llm.load_weights import load_weights
from mindspeed_llm.model import build_model
from mindspeed_llm.sharded_checkpoint import ShardedCheckpoint
from mindspeed_llm.weight_plan import local_plan
from tests.mindspeed_llm.gradients import hf_gradients
from tests.mindspeed_llm.tiny import (
    tiny_hf_config,
    tiny_moonlight_config,
    tiny_qwen3_config,
    tiny_v2_lite_config,
    write_tiny_checkpoint,
)
from tests.parallel.launcher import run_ranks


def load_and_export(paths: dict[str, str], sizes: dict[str, Any], bucket_bytes: int, dtype_name: str) -> list[str]:
    """Names whose exported tensor differs from the checkpoint's, then the order of the names."""
    hf = load_hf_config(paths["hf"])
    dtype = getattr(torch, dtype_name)
    groups = initialize_model_parallel(**sizes)
    model = build_model(hf, groups, reference_ops(), params_dtype=dtype)
    source = ShardedCheckpoint(paths["shards"]) if "shards" in paths else HFCheckpoint(paths["hf"])
    plan = local_plan(hf, groups.layout, groups.rank, "core")
    read = load_weights(model, plan, source)
    assert read == {shard.hf_name for tensor in plan for shard in tensor.shards}
    reference = HFCheckpoint(paths["hf"])
    names, wrong = [], []
    for name, tensor in export_weights(model, hf, groups, bucket_bytes):
        names.append(name)
        expected = reference.read(name).to(torch.float32 if always_fp32(name) else dtype)
        if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
            wrong.append(name)
    assert names == list(hf_tensors(hf))
    tensors = export_weights(model, hf, groups, bucket_bytes, dtype=torch.bfloat16)
    save_hf_checkpoint(tensors, paths["out"], paths["hf"], max_shard_bytes=100_000, is_writer=groups.rank == 0)
    destroy_model_parallel()
    return wrong


LAYOUTS: dict[str, tuple[int, dict[str, Any], int, list[str]]] = {
    "dp2 ep2 in bf16, no q-lora": (2, {"expert_model_parallel_size": 2}, 20_000, []),
    "tp2 pp2 ep2 uneven, from shards of tp4 pp3": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "num_layer_list": (2, 1),
        },
        50_000,
        ["--target-tensor-parallel-size", "4", "--target-pipeline-parallel-size", "3", "--moe-grouped-gemm"],
    ),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_export_returns_what_was_loaded(case: tuple[int, dict[str, Any], int, list[str]], tmp_path: Path) -> None:
    world_size, sizes, bucket_bytes, shard_flags = case
    paths = {"hf": str(tmp_path / "hf"), "out": str(tmp_path / "out")}
    config = tiny_hf_config() if shard_flags else tiny_hf_config(q_lora_rank=None)
    weights = write_tiny_checkpoint(tmp_path / "hf", config)
    if shard_flags:
        paths["shards"] = str(tmp_path / "shards")
        flags = ["--load-dir", paths["hf"], "--save-dir", paths["shards"], *shard_flags]
        assert convert_ckpt_deepseek3.main(flags) == 0
    dtype = "float32" if shard_flags else "bfloat16"
    assert run_ranks(load_and_export, world_size, paths, sizes, bucket_bytes, dtype, timeout_s=180) == [[]] * world_size
    with HFCheckpoint(tmp_path / "out") as saved:
        for name, tensor in weights.items():
            expected = tensor if always_fp32(name) else tensor.bfloat16()
            assert torch.equal(saved.read(name), expected), name


def layout(num_ranks: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1, **more: Any) -> Any:
    return ParallelLayout(num_ranks, tp, pp, cp, ep, etp, **more)


TWO_STAGES = {"virtual_pipeline_model_parallel_size": 2, "noop_layers": (2,)}
FOUR_RANKS: dict[str, tuple[dict[str, Any], ParallelLayout]] = {
    "qwen3, tp2 pp2": (tiny_qwen3_config(), layout(4, tp=2, pp=2, num_layer_list=(2, 1))),
    "qwen3 tied, tp2 pp2": (tiny_qwen3_config(tie_word_embeddings=True), layout(4, tp=2, pp=2, num_layer_list=(1, 2))),
    "qwen3 tied, one stage, tp2 cp2": (tiny_qwen3_config(tie_word_embeddings=True), layout(4, tp=2, cp=2)),
    "v3, experts split over tp2, ep2": (tiny_hf_config(), layout(4, tp=2, ep=2, etp=2)),
    "v3, pp2 of two chunks, one slot without a layer, ep2": (tiny_hf_config(), layout(4, pp=2, ep=2, **TWO_STAGES)),
    "moonlight, tp2 cp2, whole experts over all": (tiny_moonlight_config(), layout(4, tp=2, cp=2, ep=4)),
    "v2-lite, cp2, dp varying before cp": (tiny_v2_lite_config(), layout(4, cp=2, ep=2, order="tp-dp-ep-cp-pp")),
    "v3 with its prediction layer, tp2 pp2": (
        tiny_hf_config(num_nextn_predict_layers=1),
        layout(4, tp=2, pp=2, ep=2, num_layers_in_first_pipeline_stage=1),
    ),
}


def weights_and_gradients(path: str, layout: ParallelLayout) -> list[str]:
    """Names that come out unlike they went in: exported weights, and gradients that are set to the weights."""
    hf = load_hf_config(path)
    hf = hf.with_mtp(hf.num_nextn_predict_layers)
    groups = initialize_from_layout(layout)
    model = build_model(hf, groups, reference_ops(), params_dtype=torch.float32)
    source = HFCheckpoint(path)
    load_weights(model, local_plan(hf, layout, groups.rank), source)
    expected = {name: source.read(name) for name in hf_tensors(hf)}
    exported = dict(export_weights(model, hf, groups, bucket_bytes=30_000))
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(bucket_size=5000), model, groups)
    for buffer in ddp.param_and_grad_buffers:
        buffer.grad_shard.copy_(buffer.param_shard)  # the rest is what a reduce-scatter leaves: meaningless
    ddp.grads_are_final = True
    gradients = hf_gradients(ddp, hf, groups, bucket_bytes=30_000)
    destroy_model_parallel()
    assert list(exported) == list(expected)
    assert [name for name in expected if not always_fp32(name)] == list(gradients)
    wrong = [name for name, tensor in exported.items() if not torch.equal(tensor, expected[name])]
    return wrong + [f"gradient of {name}" for name, grad in gradients.items() if not torch.equal(grad, expected[name])]


def all_weights_and_gradients(cases: dict[str, tuple[str, ParallelLayout]]) -> dict[str, list[str]]:
    return {name: weights_and_gradients(path, layout) for name, (path, layout) in cases.items()}


# The parts of these are in the others: TP with PP in "qwen3 tied", one stage in the v3 of one, CP in "v2-lite".
REPEATED = {"qwen3, tp2 pp2", "qwen3 tied, one stage, tp2 cp2", "moonlight, tp2 cp2, whole experts over all"}


@pytest.mark.parametrize("names", [FOUR_RANKS.keys() - REPEATED, pytest.param(REPEATED, marks=pytest.mark.slow)])
def test_every_model_and_axis_returns_weights_and_gradients(names: set[str], tmp_path: Path) -> None:
    cases = {}
    for number, name in enumerate(sorted(names)):
        config, layout = FOUR_RANKS[name]
        write_tiny_checkpoint(tmp_path / str(number), config)
        cases[name] = str(tmp_path / str(number)), layout
    assert run_ranks(all_weights_and_gradients, 4, cases, timeout_s=180) == [{name: [] for name in cases}] * 4


def alone(paths: dict[str, str]) -> tuple[list[str], str]:
    """Export in a world of one, and the message of a plan that does not fit the model."""
    wrong = load_and_export(paths, {}, 1 << 20, "float32")
    groups = initialize_model_parallel()
    model = build_model(load_hf_config(paths["hf"]), groups, reference_ops(), params_dtype=torch.float32)
    other = parse_hf_config(tiny_hf_config(num_hidden_layers=4, moe_intermediate_size=64))
    plan = local_plan(other, groups.layout, groups.rank, "core")
    with HFCheckpoint(paths["hf"]) as source, pytest.raises(ValueError, match="loading weights") as error:
        load_weights(model, plan, source)
    destroy_model_parallel()
    return wrong, str(error.value)


def test_one_process_and_a_plan_of_another_model(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "hf")
    paths = {"hf": str(tmp_path / "hf"), "out": str(tmp_path / "out")}
    [(wrong, message)] = run_ranks(alone, 1, paths, timeout_s=180)
    assert wrong == []
    assert "the source has no model.layers.3." in message
    assert "more" in message
