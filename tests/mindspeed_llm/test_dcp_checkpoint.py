"""The model part of a training checkpoint, saved by any layout, is a source of HF tensors bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_formats.config import load_hf_config, parse_hf_config
from megatron.core.dist_checkpointing import CheckpointSaver
from megatron.core.dist_checkpointing.saved_tensors import METADATA, read_metadata
from megatron.core.ops.reference import reference_ops
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from mindspeed_llm import convert_ckpt_deepseek3_mcore2hf
from mindspeed_llm.dcp_checkpoint import DCPCheckpoint, weights_of
from mindspeed_llm.hf_checkpoint import open_hf
from mindspeed_llm.load_weights import load_weights, open_shards
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from mindspeed_llm.weight_source import fill
from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_moonlight_config, tiny_qwen3_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from verl import model_merger


def save(hf_dir: str, out: str, sizes: dict[str, Any], num_mtp: int, chunk_bytes: int) -> None:
    """A model with the weights of ``hf_dir``, saved as training saves it."""
    hf = load_hf_config(hf_dir).with_mtp(num_mtp)
    groups = initialize_model_parallel(**sizes)
    model = build_model(hf, groups, reference_ops(), params_dtype=torch.bfloat16)
    load_weights(model, local_plan(hf, groups.layout, groups.rank), open_hf(hf_dir, hf))
    CheckpointSaver(groups, max_chunk_bytes=chunk_bytes).save(out, model, None, None, {})
    destroy_model_parallel()


CASES: dict[str, tuple[dict[str, Any], int, int, dict[str, Any]]] = {
    "tp2 pp2 ep2, uneven, with prediction layers": (
        tiny_hf_config(num_nextn_predict_layers=1),
        1,
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "num_layer_list": (2, 1),
        },
    ),
    "two chunks, experts split, no q-lora": (
        tiny_moonlight_config(num_hidden_layers=4),
        0,
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
        },
    ),
    "tied qwen3 on two stages": (
        tiny_qwen3_config(tie_word_embeddings=True, num_hidden_layers=2),
        0,
        2,
        {"pipeline_model_parallel_size": 2},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_training_checkpoint_is_read_bit_for_bit(
    case: tuple[dict[str, Any], int, int, dict[str, Any]], tmp_path: Path
) -> None:
    config, num_mtp, world_size, sizes = case
    weights = write_tiny_checkpoint(tmp_path / "hf", config, dtype=torch.bfloat16)
    run_ranks(save, world_size, str(tmp_path / "hf"), str(tmp_path / "saved"), sizes, num_mtp, 3000)
    hf, draw = load_hf_config(tmp_path / "hf").with_mtp(num_mtp), random.Random(0)
    source = open_shards(tmp_path / "saved", hf)
    assert "model part of a training checkpoint" in source.describe()
    assert set(source.names()) == set(weights)
    for name, weight in weights.items():
        assert source.dtype(name) == weight.dtype and source.read(name).equal(weight), name
        ends = [sorted(draw.sample(range(size + 1), 2)) for size in weight.shape]
        found = source.read(name, tuple((a, b) for a, b in ends))
        assert found.equal(weight[tuple(slice(a, b) for a, b in ends)]), (name, ends)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """HF directory and training checkpoint of one process."""
    root = tmp_path_factory.mktemp("saved")
    config = tiny_hf_config(num_nextn_predict_layers=1, moe_intermediate_size=2048)
    write_tiny_checkpoint(root / "hf", config, dtype=torch.bfloat16)
    run_ranks(save, 2, str(root / "hf"), str(root / "saved"), {"expert_model_parallel_size": 2}, 1, 1 << 16)
    return root / "hf", root / "saved"


def test_a_slice_costs_its_bytes(saved: tuple[Path, Path]) -> None:
    """Rows of a stored tensor; it is the transpose of the HF tensor, so there columns."""
    with DCPCheckpoint(saved[1], load_hf_config(saved[0])) as source:
        name = "model.layers.1.mlp.experts.5.down_proj.weight"
        source.read(name, ((0, 64), (1024, 1056)))
        once = source.bytes_read
        assert 32 * 64 * 2 <= once < 32 * 64 * 2 + 2500  # the chunk's own headers
        source.read(name, ((0, 64), (1056, 1088)))
        assert source.bytes_read - once <= 32 * 64 * 2 + 2500


def test_a_rank_reads_what_it_holds(saved: tuple[Path, Path]) -> None:
    """In runs: an expert's gate, up and neighbours lie together and are read together."""
    hf = load_hf_config(saved[0]).with_mtp(1)
    layout = ParallelLayout(world_size=4, expert_model_parallel_size=4, pipeline_model_parallel_size=1)
    for rank in range(4):
        with DCPCheckpoint(saved[1], hf) as source, open_hf(saved[0], hf) as reference:
            held, num_chunks = 0, 0
            for tensor in local_plan(hf, layout, rank):
                found, expected = torch.empty(2, *tensor.shape, dtype=torch.bfloat16)
                source.fill(found, tensor)
                fill(expected, tensor, reference)
                assert found.equal(expected), tensor.name
                held += tensor.num_elements * source.dtype(tensor.shards[0].hf_name).itemsize
                num_chunks += -(-tensor.num_bytes // (1 << 16)) + 1
            assert held <= source.bytes_read < held + 2500 * num_chunks


def test_a_step_or_a_run_is_its_model_part(saved: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (3, 4):
        (checkpoints / f"global_step_{step}").mkdir(parents=True)
        (checkpoints / f"global_step_{step}" / "actor").symlink_to(saved[1])
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    newest = checkpoints / "global_step_3" / "actor"
    assert weights_of(newest) == weights_of(newest.parent) == weights_of(checkpoints) == newest
    assert weights_of(saved[0]) == saved[0]
    names = ["--load-dir", str(checkpoints), "--hf-config-dir", str(saved[0]), "--save-dir", str(tmp_path / "hf")]
    assert convert_ckpt_deepseek3_mcore2hf.main(names) == 0
    hf = load_hf_config(saved[0])
    with open_hf(saved[0], hf) as expected, open_hf(tmp_path / "hf", hf) as found:
        assert len(found.names()) > 40
        for name in found.names():
            assert found.read(name).equal(expected.read(name)), name


def test_upstreams_command_merges_a_step(
    saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "global_step_40"
    step.mkdir()
    (step / "actor").symlink_to(saved[1])
    given = ["merge", "--backend", "fsdp", "--local_dir", f"{step}/actor", "--target_dir", f"{tmp_path}/hf"]
    with pytest.raises(SystemExit):
        model_merger.main(given)
    assert "as --hf_model_path" in capsys.readouterr().err
    assert model_merger.main([*given, "--hf_model_path", str(saved[0])]) == 0
    (step / "huggingface").symlink_to(saved[0])  # as save_contents=[hf_model] leaves it
    assert model_merger.main(given) == 0, "the same again"
    hf = load_hf_config(saved[0])
    with open_hf(saved[0], hf) as expected, open_hf(tmp_path / "hf", hf) as found:
        assert all(found.read(name).equal(expected.read(name)) for name in found.names())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        model_merger.main(given)


def test_what_the_model_has_not_is_left_out_and_what_is_missing_named(saved: tuple[Path, Path]) -> None:
    hf = load_hf_config(saved[0])
    assert "model.layers.3.enorm.weight" not in DCPCheckpoint(saved[1], hf).names()
    config = json.loads((saved[0] / "config.json").read_text()) | {"n_routed_experts": 16, "num_hidden_layers": 4}
    with pytest.raises(ValueError, match="problem") as error:
        DCPCheckpoint(saved[1], parse_hf_config(config))
    assert "model.decoder.layers.3.input_layernorm.weight is not in it" in str(error.value)
    assert "model.decoder.layers.1.mlp.router.weight has shape (8, 64); the config makes it (16, 64)" in str(
        error.value
    )


def test_damaged_directories_are_named_with_their_tensors(saved: tuple[Path, Path], tmp_path: Path) -> None:
    hf, broken = load_hf_config(saved[0]), tmp_path / "broken"
    broken.mkdir()
    for file in saved[1].iterdir():
        os.link(file, broken / file.name)
    first, second = sorted(broken.glob("*.distcp"))
    content = second.read_bytes()
    first.unlink()
    second.unlink()
    second.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="has 2 problem") as error:
        DCPCheckpoint(broken, hf)
    assert f"{first.name} is missing; it holds parts of" in str(error.value)
    assert f"{second.name} is truncated: {len(content) // 2} of" in str(error.value)
    assert "model.decoder.layers." in str(error.value)


def test_scrambled_chunks_are_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    hf, broken = load_hf_config(saved[0]), tmp_path / "broken"
    broken.mkdir()
    for file in saved[1].iterdir():
        (broken / file.name).write_bytes(file.read_bytes().replace(b"PK", b"KP"))
    source = DCPCheckpoint(broken, hf)
    with pytest.raises(ValueError, match="are no tensor that torch.save wrote"):
        source.read("model.norm.weight")


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_metadata_is_not_run(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match=r"it refers to posix\.system, which no such file does"):
        read_metadata(tmp_path)
    (tmp_path / METADATA).write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        read_metadata(tmp_path)
