"""HF and legacy shards to torch.distributed.checkpoint and back, bit for bit; torch and the training engine read it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hf_formats.config import load_hf_config
from megatron.core.dist_checkpointing.saved_tensors import saved_tensors
from megatron.core.ops.reference import reference_ops
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from mindspeed_llm import convert_ckpt_torch_dist, fp8_cast_bf16
from mindspeed_llm.conversion.dcp_writer import DCPWriter
from mindspeed_llm.conversion.engine import Conversion, RunOptions, convert
from mindspeed_llm.conversion.inputs import open_input
from mindspeed_llm.fp8_quantize import quantize_checkpoint
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.load_weights import load_weights, open_shards
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from tests.mindspeed_llm.test_conversion import EXTENDED, GROUPED, shard, sizes, unshard
from tests.mindspeed_llm.test_dcp_checkpoint import save
from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_qwen3_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks


def to_dcp(load: Path, out: Path, *flags: str) -> int:
    return convert_ckpt_torch_dist.main(["--load-dir", str(load), "--save-dir", str(out), *flags])


def assert_holds(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    with HFCheckpoint(directory) as found:
        assert set(found.names()) == set(weights)
        assert all(found.read(name).equal(weight) for name, weight in weights.items())


def assert_same_files(left: Path, right: Path) -> None:
    names = sorted(path.relative_to(left) for path in left.rglob("*.pt"))
    assert names and all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


CASES: dict[str, tuple[list[str], dict[str, Any], int]] = {
    "tp2 pp2 ep2 extended, uneven, prediction layers": (
        [*sizes(2, 2, 2), *EXTENDED, "--num-layer-list", "2,1"],
        tiny_hf_config(num_nextn_predict_layers=1),
        1,
    ),
    "tp2 ep2 experts split": ([*sizes(2, 1, 2), *GROUPED], tiny_hf_config(q_lora_rank=None), 0),
    "ungrouped": (sizes(2, 1, 2), tiny_hf_config(), 0),
    "chunks, two slots without a layer": (
        [*sizes(1, 2, 2), *EXTENDED, "--num-layers-per-virtual-pipeline-stage", "1", "--noop-layers", "1,5"],
        tiny_hf_config(num_hidden_layers=4),
        0,
    ),
    "qwen3, tied, tp2 pp3": ([*sizes(2, 3, 1), *GROUPED], tiny_qwen3_config(tie_word_embeddings=True), 0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_legacy_to_dcp_to_legacy_and_hf(case: tuple[list[str], dict[str, Any], int], tmp_path: Path) -> None:
    flags, config, num_mtp = case
    weights = write_tiny_checkpoint(tmp_path / "hf", config, dtype=torch.bfloat16)
    mtp = ["--num-nextn-predict-layers", str(num_mtp)]
    assert shard(tmp_path / "hf", tmp_path / "legacy", *flags, *mtp) == 0
    assert to_dcp(tmp_path / "legacy", tmp_path / "dcp", "--num-files", "3", *mtp) == 0
    assert sorted(path.name for path in (tmp_path / "dcp").glob("*.distcp")) == [f"__{n}_0.distcp" for n in range(3)]
    assert shard(tmp_path / "dcp", tmp_path / "again", *flags, *mtp) == 0
    assert_same_files(tmp_path / "legacy", tmp_path / "again")
    assert unshard(tmp_path / "dcp", tmp_path / "back", tmp_path / "hf") == 0
    assert_holds(tmp_path / "back", weights)


def test_fp8_goes_straight_to_dcp_and_verify_names_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_checkpoint(tmp_path / "base", tiny_hf_config(hidden_size=160), dtype=torch.bfloat16)
    quantize_checkpoint(tmp_path / "base", tmp_path / "fp8")
    paths = ["--input-fp8-hf-path", str(tmp_path / "fp8"), "--output-bf16-hf-path", str(tmp_path / "bf16")]
    assert fp8_cast_bf16.main([*paths, "--num-nextn-predict-layers", "1"]) == 0
    flags = ["--num-nextn-predict-layers", "1", "--num-files", "2"]
    assert to_dcp(tmp_path / "fp8", tmp_path / "dcp", *flags) == 0
    assert unshard(tmp_path / "dcp", tmp_path / "back", tmp_path / "fp8") == 0
    with HFCheckpoint(tmp_path / "bf16") as cast:
        assert_holds(tmp_path / "back", {name: cast.read(name) for name in cast.names()})
    assert to_dcp(tmp_path / "fp8", tmp_path / "dcp", *flags, "--verify") == 0
    file = tmp_path / "dcp" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert to_dcp(tmp_path / "fp8", tmp_path / "dcp", *flags, "--verify") == 1
    assert "__1_0.distcp: model." in capsys.readouterr().err


def load_again(dcp_dir: str, hf_dir: str, sizes: dict[str, Any]) -> None:
    """A model from a distributed checkpoint is that of the HF directory."""
    hf = load_hf_config(hf_dir).with_mtp(1)
    groups = initialize_model_parallel(**sizes)
    plan = local_plan(hf, groups.layout, groups.rank)
    states = []
    for source in (open_shards(dcp_dir, hf), HFCheckpoint(hf_dir)):
        model = build_model(hf, groups, reference_ops(), params_dtype=torch.bfloat16)
        load_weights(model, plan, source)
        states.append(model.state_dict())
    assert all(states[0][name].equal(value) for name, value in states[1].items())
    destroy_model_parallel()


def test_torch_and_the_training_engine_read_it(tmp_path: Path) -> None:
    """Chunks of a few rows; keys, shapes and dtypes are those of what training saves."""
    config = tiny_hf_config(num_nextn_predict_layers=1)
    write_tiny_checkpoint(tmp_path / "hf", config, dtype=torch.bfloat16)
    found = open_input(tmp_path / "hf", 1)
    writer = pickle.loads(pickle.dumps(DCPWriter(found.source, found.config, 1, num_files=4, max_chunk_bytes=3000)))
    convert(Conversion("test", {}, found.files, found.source, writer, found.hf), tmp_path / "dcp", RunOptions())
    stored = saved_tensors(tmp_path / "dcp")
    assert max(len(tensor.chunks) for tensor in stored.values()) > 4
    state = {key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in stored.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    source = pickle.loads(pickle.dumps(open_shards(tmp_path / "dcp", found.hf)))
    assert source.describe() == "a distributed checkpoint of weights"
    embedding = state["model.embedding.word_embeddings.weight"]
    assert embedding.equal(source.read("model.embed_tokens.weight", tuple((0, size) for size in embedding.shape)))
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    run_ranks(load_again, 2, str(tmp_path / "dcp"), str(tmp_path / "hf"), sizes)
    run_ranks(save, 2, str(tmp_path / "hf"), str(tmp_path / "saved"), sizes, 1, 1 << 26)
    trained = {key: tensor for key, tensor in saved_tensors(tmp_path / "saved").items() if key.startswith("model.")}
    assert {key: (t.shape, t.dtype) for key, t in trained.items()} == {
        key: (t.shape, t.dtype) for key, t in stored.items()
    }


def test_a_training_checkpoint_becomes_hf_and_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = write_tiny_checkpoint(tmp_path / "hf", dtype=torch.bfloat16)
    run_ranks(save, 2, str(tmp_path / "hf"), str(tmp_path / "saved"), {"expert_model_parallel_size": 2}, 0, 1 << 26)
    assert unshard(tmp_path / "saved", tmp_path / "back", tmp_path / "hf") == 0
    assert_holds(tmp_path / "back", weights)
    flags = [*sizes(2, 1, 2), *EXTENDED]
    assert shard(tmp_path / "hf", tmp_path / "legacy", *flags) == 0
    assert shard(tmp_path / "saved", tmp_path / "again", *flags, "--hf-config-dir", str(tmp_path / "hf")) == 0
    assert_same_files(tmp_path / "legacy", tmp_path / "again")
    assert to_dcp(tmp_path / "saved", tmp_path / "dcp") == 1
    assert "does not say of which model it is; give --hf-config-dir" in capsys.readouterr().err
    source = [*sizes(2, 1, 1, prefix="source"), *EXTENDED]
    assert unshard(tmp_path / "saved", tmp_path / "other", tmp_path / "hf", *source) == 1
    assert "is a distributed checkpoint, which has no layout" in capsys.readouterr().err
