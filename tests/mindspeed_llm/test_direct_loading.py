"""Training loads a Hugging Face directory, FP8 too, without conversion; each rank reads its bytes and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_formats.config import load_hf_config
from hf_formats.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX
from megatron.core.ops.reference import reference_ops
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from mindspeed_llm import fp8_cast_bf16
from mindspeed_llm.fp8_quantize import quantize_checkpoint
from mindspeed_llm.hf_checkpoint import HFCheckpoint, open_hf
from mindspeed_llm.load_weights import load_weights
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import Shard, local_plan
from mindspeed_llm.weight_source import fill
from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_qwen3_config, tiny_weights, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks

# Columns that are cut leave a page or more between the rows of a rank.
WIDE: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 4 * 4224,
    "moe_intermediate_size": 2 * 4160,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "v_head_dim": 4160,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
}
LAYOUTS = {
    "tp4": ParallelLayout(world_size=4, tensor_model_parallel_size=4),
    "tp2 pp2, experts split": ParallelLayout(
        world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_tensor_parallel_size=2
    ),
    "tp2 ep4": ParallelLayout(world_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=4),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wide model in FP8 and its conversion to BF16."""
    root = tmp_path_factory.mktemp("published")
    write_tiny_checkpoint(root / "base", tiny_hf_config(**WIDE), dtype=torch.bfloat16)
    quantize_checkpoint(root / "base", root / "fp8", num_mtp_layers=1)
    paths = ["--input-fp8-hf-path", str(root / "fp8"), "--output-bf16-hf-path", str(root / "bf16")]
    assert fp8_cast_bf16.main([*paths, "--num-nextn-predict-layers", "1"]) == 0
    return root / "fp8", root / "bf16"


def stored_bytes(source: HFCheckpoint, shard: Shard) -> int:
    """Bytes of a shard in the files: its own, and of FP8 a scale for each block that it touches."""
    dtype = source.dtype(shard.hf_name)
    num_bytes = dtype.itemsize
    num_scales = 1
    for start, stop in shard.ranges:
        num_bytes *= stop - start
        num_scales *= -(-stop // BLOCK) - start // BLOCK
    return num_bytes + (4 * num_scales if dtype == FP8_DTYPE else 0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_each_rank_reads_its_own_bytes(layout: ParallelLayout, published: tuple[Path, Path]) -> None:
    fp8, bf16 = published
    hf = load_hf_config(fp8).with_mtp(1)
    for rank in range(layout.world_size):
        with open_hf(fp8, hf) as source, HFCheckpoint(bf16) as reference:
            wanted = 0
            for tensor in local_plan(hf, layout, rank):
                direct, converted = torch.empty(2, *tensor.shape, dtype=torch.bfloat16)
                fill(direct, tensor, source)
                fill(converted, tensor, reference)
                assert direct.equal(converted), tensor.name
                wanted += sum(stored_bytes(source, shard) for shard in tensor.shards)
            assert wanted <= source.bytes_read < 1.001 * wanted  # scales in between are read through


def load_and_compare(fp8: str, bf16: str, sizes: dict[str, Any]) -> int:
    """Bytes read by this rank's model, equal to the model of the converted directory."""
    hf = load_hf_config(fp8)
    groups = initialize_model_parallel(**sizes)
    plan = local_plan(hf, groups.layout, groups.rank)
    states = []
    for path in (fp8, bf16):
        model = build_model(hf, groups, reference_ops(), params_dtype=torch.bfloat16)
        with open_hf(path, hf) as source:
            load_weights(model, plan, source)
            states.append((model.state_dict(), source.bytes_read))
    destroy_model_parallel()
    (one, num_bytes), (other, _) = states
    assert all(one[name].equal(other[name]) for name in other)
    return num_bytes


def test_a_model_is_the_one_of_the_converted_directory(published: tuple[Path, Path]) -> None:
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    read = run_ranks(load_and_compare, 2, *map(str, published), sizes)
    size = sum(file.stat().st_size for file in published[0].glob("*.safetensors"))
    assert max(read) < 0.55 * size  # a half each, and what is replicated


def test_damage_is_named_with_its_tensors(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "base", tiny_hf_config(hidden_size=160), dtype=torch.bfloat16)
    quantize_checkpoint(tmp_path / "base", tmp_path / "fp8", num_shards=4)
    hf = load_hf_config(tmp_path / "fp8")
    first, second, third, _ = sorted((tmp_path / "fp8").glob("*.safetensors"))
    tensors = load_file(third)
    name = next(name for name in tensors if name.endswith(SCALE_SUFFIX))
    tensors[name].view(-1)[0] = float("inf")
    save_file(tensors, third)
    weight = name.removesuffix(SCALE_SUFFIX)
    plan = local_plan(hf, ParallelLayout(), 0)
    tensor = next(tensor for tensor in plan if weight in {shard.hf_name for shard in tensor.shards})
    with open_hf(tmp_path / "fp8", hf) as source, pytest.raises(ValueError, match=f"{name} is inf for block"):
        fill(torch.empty(tensor.shape), tensor, source)
    del tensors[name]
    save_file(tensors, third)
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    held = [tensor for tensor, file in index["weight_map"].items() if file == first.name]
    first.unlink()
    os.truncate(second, second.stat().st_size - 1)
    with pytest.raises(ValueError, match="has 3 problem") as error:
        open_hf(tmp_path / "fp8", hf)
    assert f"{first.name} is missing; it should hold {len(held)} tensors: " in str(error.value)
    assert held[0] in str(error.value)
    assert f"{second.name} is truncated" in str(error.value)
    assert f"{third.name} does not hold {name}" in str(error.value)


def test_fp8_without_scales_or_in_other_blocks(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "base", dtype=torch.bfloat16)
    quantize_checkpoint(tmp_path / "base", tmp_path / "fp8", num_shards=1)
    hf = load_hf_config(tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    file = next((tmp_path / "fp8").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(SCALE_SUFFIX))
    del tensors[name]
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    (tmp_path / "fp8" / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"weight_block_size=\[64, 64\]") as error:
        open_hf(tmp_path / "fp8", hf)
    assert f"is FP8 and has no {name}" in str(error.value)


def rewritten(folder: Path, **changed: torch.Tensor) -> Path:
    """The checkpoint of ``folder``, of one file, with other or more tensors."""
    save_file(load_file(folder / "model.safetensors") | changed, folder / "model.safetensors")
    return folder


def one_file(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(config, dtype=dtype), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named_with_its_file(tmp_path: Path, value: float) -> None:
    folder = one_file(tmp_path / "hf", tiny_hf_config())
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    bad = load_file(folder / "model.safetensors")[name]
    bad[3, 7] = value
    hf = load_hf_config(rewritten(folder, **{name: bad}))
    with open_hf(folder, hf) as source, pytest.raises(ValueError, match=rf"weight {name} of .*model\.safetensors is"):
        for tensor in local_plan(hf, ParallelLayout(), 0):
            fill(torch.empty(tensor.shape), tensor, source)


def test_a_quantised_weight_that_is_not_finite_is_named(published: tuple[Path, Path], tmp_path: Path) -> None:
    hf = load_hf_config(published[0])
    name = "model.layers.0.mlp.down_proj.weight"
    for file in published[0].iterdir():
        tensors = load_file(file) if file.suffix == ".safetensors" else {}
        if name in tensors:
            tensors[name].view(torch.uint8)[0, 0] = 0x7F  # NaN
            save_file(tensors, tmp_path / file.name)
        else:
            os.link(file, tmp_path / file.name)
    tensor = next(t for t in local_plan(hf, ParallelLayout(), 0) if any(s.hf_name == name for s in t.shards))
    with open_hf(tmp_path, hf) as source, pytest.raises(ValueError, match=rf"weight {name} of .* is nan at \(0, 0\)"):
        fill(torch.empty(tensor.shape, dtype=torch.bfloat16), tensor, source)


def test_what_published_checkpoints_store_beside_the_weights_is_left_out(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "hf", tiny_qwen3_config(tie_word_embeddings=True))
    hf = load_hf_config(folder)
    held = set(open_hf(folder, hf).names())
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.rotary_emb.inv_freq": torch.ones(4),
    }
    rewritten(folder, **{"lm_head.weight": embedding.clone()}, **buffers)
    assert set(open_hf(folder, hf).names()) == held
    with pytest.raises(ValueError, match=r"lm_head\.weight \(model\.safetensors\) differs from model\.embed_tokens"):
        open_hf(rewritten(folder, **{"lm_head.weight": embedding + 1}), hf)
    other = {"lm_head.weight": embedding.clone(), "model.layers.0.stray": torch.ones(1)}
    with pytest.raises(ValueError, match=r"model\.layers\.0\.stray is not part of the model"):
        open_hf(rewritten(folder, **other), hf)
