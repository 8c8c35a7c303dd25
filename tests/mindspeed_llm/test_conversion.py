"""HF -> shards -> HF is bit-equal in every layout; bad flags, damaged and interrupted conversions leave nothing."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_formats.config import load_hf_config
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm import convert_ckpt_deepseek3, convert_ckpt_deepseek3_mcore2hf
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.sharded_checkpoint import LAYOUT_NAME, ShardedCheckpoint
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint

GROUPED = ["--moe-grouped-gemm"]
EXTENDED = [*GROUPED, "--moe-tp-extend-ep"]


def sizes(tensor: int, pipeline: int, expert: int, prefix: str = "target") -> list[str]:
    axes = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
    return [part for axis, size in axes.items() for part in (f"--{prefix}-{axis}-parallel-size", str(size))]


def shard(load: Path, save: Path, *flags: str) -> int:
    return convert_ckpt_deepseek3.main(["--load-dir", str(load), "--save-dir", str(save), *flags])


def unshard(load: Path, save: Path, config: Path, *flags: str) -> int:
    paths = ["--load-dir", str(load), "--save-dir", str(save), "--hf-config-dir", str(config)]
    return convert_ckpt_deepseek3_mcore2hf.main([*paths, *flags])


CASES: dict[str, tuple[list[str], dict[str, Any], int]] = {
    "tp2 pp2 extended": ([*sizes(2, 2, 1), *EXTENDED, "--num-layer-list", "2,1"], {}, 4),
    "tp2 pp2 ep2 extended": ([*sizes(2, 2, 2), *EXTENDED, "--num-layer-list", "2,1"], {}, 8),
    "tp2 ep2 experts split": ([*sizes(2, 1, 2), *GROUPED], {}, 4),
    "tp2 ep2 ungrouped": (sizes(2, 1, 2), {}, 4),
    "pp3": ([*sizes(1, 3, 1), *GROUPED, "--num-layers", "3", "--first-k-dense-replace", "1"], {}, 3),
    "ep4": ([*sizes(1, 1, 4), *GROUPED], {}, 4),
    "tp4 without q-lora": ([*sizes(4, 1, 1), *EXTENDED], {"q_lora_rank": None}, 4),
    "chunks, two slots without a layer": (
        [*sizes(1, 2, 2), *EXTENDED, "--num-layers-per-virtual-pipeline-stage", "1", "--noop-layers", "1,5"],
        {"num_hidden_layers": 4},
        4,
    ),
    "tp2 pp2 with prediction layers": (
        [*sizes(2, 2, 1), *GROUPED, "--num-layer-list", "1,2", "--num-nextn-predict-layers", "2"],
        {"num_nextn_predict_layers": 2},
        4,
    ),
    "tp4 pp8 ep8 extended, uneven": (
        [*sizes(4, 8, 8), *EXTENDED, "--num-layer-list", "1,1,2,2,2,2,2,1", "--num-nextn-predict-layers", "1"],
        {"num_hidden_layers": 13, "n_routed_experts": 32, "num_nextn_predict_layers": 1},
        256,
    ),
    "tp4 pp8 ep8 experts split": ([*sizes(4, 8, 8), *GROUPED], {"num_hidden_layers": 8, "n_routed_experts": 16}, 256),
    "all dense": ([*sizes(2, 1, 1), *GROUPED], {"first_k_dense_replace": 3}, 2),
}


# Of 256 files; "tp2 pp2 ep2 extended", "... with prediction layers" and "tp2 ep2 experts split" have few.
SLOW = ("tp4 pp8 ep8 extended, uneven", "tp4 pp8 ep8 experts split")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in CASES.items()]
)
def test_round_trip_is_bit_equal(case: tuple[list[str], dict[str, Any], int], tmp_path: Path) -> None:
    flags, overrides, num_files = case
    weights = write_tiny_checkpoint(tmp_path / "hf", tiny_hf_config(**overrides), dtype=torch.bfloat16)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    assert shard(tmp_path / "hf", tmp_path / "shards", *flags) == 0
    assert len(list((tmp_path / "shards").glob("iter_0000001/mp_rank_*/model_optim_rng.pt"))) == num_files
    assert (tmp_path / "shards" / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert unshard(tmp_path / "shards", tmp_path / "back", tmp_path / "hf") == 0
    with HFCheckpoint(tmp_path / "back") as back:
        assert set(back.names()) == set(weights)
        for name, tensor in weights.items():
            assert back.dtype(name) == tensor.dtype, name
            assert torch.equal(back.read(name), tensor), name
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_files_are_mindspeed_llms(tmp_path: Path) -> None:
    weights = write_tiny_checkpoint(tmp_path / "hf", dtype=torch.bfloat16)
    assert shard(tmp_path / "hf", tmp_path / "shards", *sizes(2, 1, 2), *EXTENDED) == 0
    file = tmp_path / "shards" / "iter_0000001" / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=True)
    assert (content["checkpoint_version"], content["iteration"]) == (3.0, 1)
    model = content["model"]
    attention = "decoder.layers.1.self_attention."
    source = "model.layers.1.self_attn."
    both = torch.cat([weights[source + "q_a_proj.weight"], weights[source + "kv_a_proj_with_mqa.weight"]])
    assert torch.equal(model[attention + "linear_qkv.weight"], both)
    assert torch.equal(model[attention + "linear_qb.weight"], weights[source + "q_b_proj.weight"].chunk(2)[1])
    assert torch.equal(model[attention + "linear_proj.weight"], weights[source + "o_proj.weight"].chunk(2, 1)[1])
    assert model["decoder.layers.1.mlp.router.expert_bias"].dtype == torch.float32
    # ep 1, tp 1 is slot 3 of 4: experts 6 and 7, in storage order [expert][H][2F] viewed as [H, -1].
    expert = "model.layers.1.mlp.experts.7."
    weight1 = model["decoder.layers.1.mlp.experts.weight1"]
    assert weight1.shape == (64, 2 * 64)
    gate_up = torch.cat([weights[expert + "gate_proj.weight"], weights[expert + "up_proj.weight"]]).T
    assert torch.equal(weight1.view(2, 64, 64)[1], gate_up)
    weight2 = model["decoder.layers.1.mlp.experts.weight2"]
    assert torch.equal(weight2[32:], weights[expert + "down_proj.weight"].T)


def test_slices_across_fragments_and_a_checkpoint_without_manifest(tmp_path: Path) -> None:
    weights = write_tiny_checkpoint(tmp_path / "hf")
    flags = [*sizes(2, 1, 2), *GROUPED]
    assert shard(tmp_path / "hf", tmp_path / "shards", *flags) == 0
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    source = ShardedCheckpoint(tmp_path / "shards")
    assert torch.equal(source.read(name, ((5, 50), (10, 30))), weights[name][5:50, 10:30])
    assert source.dtype(name) == torch.float32
    (tmp_path / "shards" / LAYOUT_NAME).unlink()
    with pytest.raises(ValueError, match="say with which layout"):
        ShardedCheckpoint(tmp_path / "shards")
    as_source = [*sizes(2, 1, 2, prefix="source"), *GROUPED]
    assert unshard(tmp_path / "shards", tmp_path / "back", tmp_path / "hf", *as_source) == 0
    with HFCheckpoint(tmp_path / "back") as back:
        assert all(torch.equal(back.read(name), tensor) for name, tensor in weights.items())


def test_layout_that_contradicts_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_checkpoint(tmp_path / "hf")
    assert shard(tmp_path / "hf", tmp_path / "shards", *sizes(2, 1, 1), *EXTENDED) == 0
    flags = [*sizes(1, 1, 2, prefix="source"), *EXTENDED]
    assert unshard(tmp_path / "shards", tmp_path / "back", tmp_path / "hf", *flags) == 1
    assert "was written for" in capsys.readouterr().err


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "hf")
    assert shard(tmp_path / "hf", tmp_path / "shards", *sizes(1, 3, 1), *GROUPED) == 0
    files = sorted((tmp_path / "shards").rglob("*.pt"))
    files[0].unlink()
    os.truncate(files[1], 1000)
    with pytest.raises(ValueError, match="has 2 problem") as error:
        ShardedCheckpoint(tmp_path / "shards")
    assert "mp_rank_00_000/model_optim_rng.pt is missing" in str(error.value)
    assert "mp_rank_00_001/model_optim_rng.pt has 1000 bytes" in str(error.value)
    (tmp_path / "shards" / LAYOUT_NAME).unlink()
    with pytest.raises(ValueError, match="is truncated"):
        layout = ParallelLayout(world_size=3, pipeline_model_parallel_size=3)
        ShardedCheckpoint(tmp_path / "shards", load_hf_config(tmp_path / "hf"), layout)


def test_rerun_is_idempotent_and_other_flags_rebuild(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_checkpoint(tmp_path / "hf")
    for expected in ("written to", "nothing to do"):
        assert shard(tmp_path / "hf", tmp_path / "shards", *sizes(2, 1, 1), *EXTENDED) == 0
        assert expected in capsys.readouterr().out
    assert shard(tmp_path / "hf", tmp_path / "shards", *sizes(1, 1, 1)) == 0
    assert "written to" in capsys.readouterr().out
    assert len(list((tmp_path / "shards").rglob("*.pt"))) == 1
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("keep")
    assert shard(tmp_path / "hf", tmp_path / "foreign", *sizes(1, 1, 1)) == 1
    assert "was not made by convert_ckpt_deepseek3" in capsys.readouterr().err


def test_flag_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_checkpoint(tmp_path / "hf")
    bad = [*sizes(3, 2, 1), *GROUPED, "--num-layers", "61", "--first-k-dense-replace", "3"]
    assert shard(tmp_path / "hf", tmp_path / "out", *bad) == 1
    message = capsys.readouterr().err
    for part in ("--num-layers is 61", "--first-k-dense-replace is 3", "4 attention heads", "give num_layer_list"):
        assert part in message
    assert shard(tmp_path / "hf", tmp_path / "out", "--moe-tp-extend-ep") == 1
    assert "needs --moe-grouped-gemm" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        shard(tmp_path / "hf", tmp_path / "out", "--target-tensor-paralel-size", "2")
    assert "unrecognized arguments" in capsys.readouterr().err
    assert shard(tmp_path / "nowhere", tmp_path / "out") == 1
    assert "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def shard_aside(root: Path, flags: list[str]) -> None:
    sys.exit(shard(root / "hf", root / "shards", *flags))


def test_a_terminated_conversion_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_hf_config(hidden_size=256, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=6)
    write_tiny_checkpoint(tmp_path / "hf", config)
    flags = [*sizes(2, 1, 4), *EXTENDED]
    process = multiprocessing.get_context("forkserver").Process(target=shard_aside, args=(tmp_path, flags))
    process.start()
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("shards.partial/iter_*/*/*.pt")):
        assert process.is_alive(), "the conversion ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.terminate()
    process.join(30)
    assert process.exitcode == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "shards.partial"]
    assert shard(tmp_path / "hf", tmp_path / "shards", *flags) == 1
    assert "continue with --resume" in capsys.readouterr().err
    assert shard(tmp_path / "hf", tmp_path / "shards", *flags, "--resume") == 0
    assert shard(tmp_path / "hf", tmp_path / "unbroken", *flags) == 0
    assert_same_bytes(tmp_path / "shards", tmp_path / "unbroken")


def assert_same_bytes(left: Path, right: Path) -> None:
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*")) for root in (left, right)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (left / name).is_dir() or (left / name).read_bytes() == (right / name).read_bytes(), name
