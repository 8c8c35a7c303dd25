"""The published FP8 form of a checkpoint round-trips through the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_formats.config import load_hf_config
from mindspeed_llm import fp8_cast_bf16, fp8_quantize
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint


def make_fp8(tmp_path: Path, *flags: str) -> Path:
    base = tmp_path / "base"
    write_tiny_checkpoint(base, tiny_hf_config(hidden_size=160, torch_dtype="bfloat16"))
    (base / "tokenizer.json").write_text("{}")
    out = tmp_path / "fp8"
    arguments = ["--input-bf16-hf-path", str(base), "--output-fp8-hf-path", str(out), *flags]
    assert fp8_quantize.main(arguments) == 0
    return out


def cast(source: Path, target: Path, *flags: str) -> int:
    return fp8_cast_bf16.main(["--input-fp8-hf-path", str(source), "--output-bf16-hf-path", str(target), *flags])


def test_published_form(tmp_path: Path) -> None:
    fp8 = make_fp8(tmp_path, "--num-shards", "3")
    assert len(list(fp8.glob("model-*-of-00003.safetensors"))) == 3
    config = json.loads((fp8 / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["num_nextn_predict_layers"] == 1
    with HFCheckpoint(fp8) as checkpoint:
        name = "model.layers.3.mlp.experts.0.gate_proj.weight"
        assert checkpoint.dtype(name) == torch.float8_e4m3fn
        assert checkpoint.shape(name + "_scale_inv") == (1, 2)
        assert checkpoint.dtype("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
        assert checkpoint.dtype("model.layers.3.eh_proj.weight") == torch.bfloat16
        for part in ("enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"):
            assert f"model.layers.3.{part}.weight" in checkpoint.names()


def test_cast_output_is_right_as_it_stands(tmp_path: Path) -> None:
    from transformers import DeepseekV3ForCausalLM

    fp8, bf16 = make_fp8(tmp_path), tmp_path / "bf16"
    assert cast(fp8, bf16) == 0
    tensors: dict[str, torch.Tensor] = {}
    for file in fp8.glob("*.safetensors"):
        tensors.update(load_file(file))
    by_hand = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv") or name.startswith("model.layers.3."):
            continue
        scale = tensors.get(name + "_scale_inv")
        if scale is not None:
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
            tensor = (tensor.float() * wide).to(torch.bfloat16)
        by_hand[name] = tensor
    with HFCheckpoint(bf16) as checkpoint:
        assert set(checkpoint.names()) == set(by_hand)
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in by_hand.items())
    config = json.loads((bf16 / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["num_nextn_predict_layers"], config["topk_method"]) == (0, "noaux_tc")
    assert (bf16 / "tokenizer.json").read_text() == "{}"
    index = json.loads((bf16 / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in by_hand.values())

    loaded: Any = DeepseekV3ForCausalLM.from_pretrained(bf16, dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    hand_dir = tmp_path / "hand"
    hand_dir.mkdir()
    save_file(by_hand, hand_dir / "model.safetensors", metadata={"format": "pt"})
    (hand_dir / "config.json").write_text(json.dumps(tiny_hf_config(hidden_size=160)))
    expected = DeepseekV3ForCausalLM.from_pretrained(hand_dir, dtype=torch.float32)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0, atol=0)


def test_mtp_of_the_input_is_kept(tmp_path: Path) -> None:
    base = tmp_path / "base"
    weights = write_tiny_checkpoint(base)
    extra = {"model.layers.3.enorm.weight": torch.full((64,), 3.0)}
    save_file(extra, base / "mtp.safetensors", metadata={"format": "pt"})
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.3.enorm.weight"] = "mtp.safetensors"
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fp8_quantize.quantize_checkpoint(base, tmp_path / "fp8")
    with HFCheckpoint(tmp_path / "fp8") as checkpoint:
        assert checkpoint.read("model.layers.3.enorm.weight").tolist() == [3.0] * 64
        head = checkpoint.read("model.layers.3.shared_head.head.weight")
        assert torch.equal(head, weights["lm_head.weight"].bfloat16())
    assert cast(tmp_path / "fp8", tmp_path / "bf16", "--num-nextn-predict-layers", "1") == 0
    assert load_hf_config(tmp_path / "bf16").num_nextn_predict_layers == 1
    with HFCheckpoint(tmp_path / "bf16") as checkpoint:
        assert checkpoint.read("model.layers.3.enorm.weight").tolist() == [3.0] * 64
        assert checkpoint.dtype("model.layers.3.mlp.experts.0.up_proj.weight") == torch.bfloat16


def test_a_missing_scale_is_an_error_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8 = make_fp8(tmp_path)
    index = json.loads((fp8 / "model.safetensors.index.json").read_text())
    name = "model.layers.2.self_attn.o_proj.weight_scale_inv"
    del index["weight_map"][name]
    (fp8 / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cast(fp8, tmp_path / "bf16") == 1
    assert name in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "fp8"]


def test_skips_when_done_and_redoes_when_the_weights_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp8, bf16 = make_fp8(tmp_path), tmp_path / "bf16"
    assert cast(fp8, bf16) == 0
    before = (bf16 / "manifest.json").stat().st_mtime_ns
    assert cast(fp8, bf16) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (bf16 / "manifest.json").stat().st_mtime_ns == before
    (bf16 / "tokenizer.json").unlink()
    assert cast(fp8, bf16) == 0
    assert (bf16 / "tokenizer.json").exists()
    capsys.readouterr()
    shard = sorted(fp8.glob("*.safetensors"))[0]
    changed = bytearray(shard.read_bytes())
    changed[-1] ^= 1  # same sizes, same headers, other weights
    shard.write_bytes(changed)
    assert cast(fp8, bf16) == 0
    assert "written to" in capsys.readouterr().out
