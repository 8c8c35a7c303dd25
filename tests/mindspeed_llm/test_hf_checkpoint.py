"""A damaged checkpoint is named file by file before it is used; a written one is whole or absent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_formats.config import parse_hf_config
from mindspeed_llm.cli_io import atomic_directory
from mindspeed_llm.hf_checkpoint import HFCheckpoint, check_against_config, save_hf_checkpoint
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint


def test_reads_slices(tmp_path: Path) -> None:
    weights = write_tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    with HFCheckpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(weights)
        name = "model.layers.0.self_attn.q_b_proj.weight"
        assert checkpoint.dtype(name) == torch.bfloat16
        assert torch.equal(checkpoint.read(name), weights[name])
        assert torch.equal(checkpoint.read(name, ((10, 20), (3, 9))), weights[name][10:20, 3:9])
        with pytest.raises(ValueError, match=r"has no tensor model\.nothing"):
            checkpoint.read("model.nothing")


def test_missing_and_truncated_shards_and_lost_tensors_in_one_error(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, num_shards=5)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[0].unlink()
    os.truncate(shards[1], shards[1].stat().st_size - 100)
    os.truncate(shards[2], 5)
    shards[3].write_bytes((3).to_bytes(8, "little") + b"{]}")
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["model.lost.weight"] = shards[4].name
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="has 5 problem") as error:
        HFCheckpoint(tmp_path)
    message = str(error.value)
    assert f"{shards[0].name} is missing" in message
    assert f"{shards[1].name} is truncated" in message
    assert f"{shards[2].name} is truncated" in message
    assert f"{shards[3].name} has an unreadable" in message
    assert "model.lost.weight" in message


def test_no_weights_or_a_broken_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds neither"):
        HFCheckpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="is no safetensors index"):
        HFCheckpoint(tmp_path)


def test_config_that_does_not_belong_to_the_weights(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    hf = parse_hf_config(tiny_hf_config(vocab_size=256, n_routed_experts=16))
    with HFCheckpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match="problem") as error:
        check_against_config(checkpoint, hf)
    assert "model.embed_tokens.weight has shape (128, 64); config.json makes it (256, 64)" in str(error.value)
    assert "more" in str(error.value)


def test_saved_checkpoint_has_shards_index_and_config(tmp_path: Path) -> None:
    weights = write_tiny_checkpoint(tmp_path / "in")
    (tmp_path / "in" / "tokenizer_config.json").write_text("{}")
    save_hf_checkpoint(iter(weights.items()), tmp_path / "out", tmp_path / "in", max_shard_bytes=100_000)
    with HFCheckpoint(tmp_path / "out") as checkpoint:
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in weights.items())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 3
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    save_hf_checkpoint(iter(weights.items()), tmp_path / "out", tmp_path / "in")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


def test_shards_end_where_the_header_is_full_or_a_tensor_would_lie_askew(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "in")
    weights = {f"{number}.{'x' * 2000}": torch.full((3,), number) for number in range(200)}
    weights |= {"odd": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(2), "nothing": torch.ones(0)}
    save_hf_checkpoint(iter(weights.items()), tmp_path / "out", tmp_path / "in")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    read = [load_file(shard) for shard in shards]
    assert [list(shard)[-1] for shard in read[-2:]] == ["odd", "nothing"] and 3 <= len(read) <= 4
    together = {name: tensor for shard in read for name, tensor in shard.items()}
    assert together.keys() == weights.keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in weights.items())


def test_a_failed_write_leaves_the_old_output_and_nothing_else(tmp_path: Path) -> None:
    weights = write_tiny_checkpoint(tmp_path / "in")

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:20]
        raise RuntimeError("stopped half way")

    with pytest.raises(RuntimeError, match="half way"):
        save_hf_checkpoint(failing(), tmp_path / "out", tmp_path / "in", max_shard_bytes=50_000)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="no Hugging Face directory"):
        save_hf_checkpoint(iter(weights.items()), tmp_path / "mine", tmp_path / "in")


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    dead = tmp_path / f"out.tmp-{socket.gethostname()}-{ended.pid}"
    other_host = tmp_path / f"out.tmp-elsewhere-{ended.pid}"
    dead.mkdir()
    other_host.mkdir()
    with atomic_directory(tmp_path / "out") as building:
        (building / "file").write_text("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", other_host.name]


def test_output_below_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="cannot create"), atomic_directory(tmp_path / "file" / "out"):
        raise AssertionError("the block must not run")
