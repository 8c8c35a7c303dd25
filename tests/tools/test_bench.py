"""The benchmarks run and report what they measured; their figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_formats.cores import usable_cores
from tests.published import smollm2
from tests.ray_workers import forked_workers
from tools.workshop.bench import data_plane, scale, step, threads, train
from tools.workshop.bench.models import Batch, matmul_flops, mixed_lengths, parsed, small_config

TINY = "--hidden-size 64 --num-layers 2 --num-experts 8 --vocab-size 64 --tokens 96 --length 32 --micro-tokens 64"


# Each engine and way to batch is a process of its own, which imports what it measures.
@pytest.mark.slow
@pytest.mark.parametrize("mixed", ["none", "all"])
def test_training_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str], mixed: str) -> None:
    file = tmp_path / "report.json"
    options = f"{TINY} --threads 1 --steps 1 --engines megatron,transformers-bf16 --mixed {mixed} --json {file}"
    assert train.main(options.split()) == 0
    [report] = json.loads(file.read_text())
    rows = report["rows"]
    kinds = [(row["engine"].split(",")[0], row["batch"], row["is_packed"]) for row in rows]
    equal = [("megatron", "equal", True), ("transformers", "equal", False)]
    padded_or_packed = [("megatron", "mixed", False), ("transformers", "mixed", False), ("megatron", "mixed", True)]
    assert kinds == (equal + padded_or_packed if mixed == "all" else equal)
    assert all(row["tokens_per_s"] > 0 and row["peak_bytes"] > 0 and row["matmul_use"] > 0 for row in rows)
    # Random ids, nearly untrained: every engine and every way to batch sees a loss of about ln(64).
    assert all(row["losses"][-1] == pytest.approx(4.16, abs=0.3) for row in rows)
    assert "x peak memory" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(usable_cores() < 2, reason="a second thread needs a second core")
def test_a_published_model_gains_from_a_second_thread_as_its_products_do(tmp_path: Path) -> None:
    file = tmp_path / "threads.json"
    before = torch.get_num_threads()
    try:
        assert threads.main(["--model", str(smollm2()), "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(before)
    rows = {row["work"]: row for row in json.loads(file.read_text())}
    print({name: (row["gain"], row["of linear"]) for name, row in rows.items()})
    if (others := rows["update"]["others"]) > 0.1:
        pytest.skip(f"other processes took {others:.2f} cores: threads that wait for each other cannot be timed")
    assert all(rows[name]["of linear"] >= 0.85 for name in ("generation", "update")), rows


def test_threads_that_are_not_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert threads.main(["--model", str(tmp_path), "--threads", str(usable_cores() + 1)]) == 2
    assert threads.main(["--model", str(tmp_path), "--threads", "1"]) == 2
    said = capsys.readouterr().err
    assert f"this process may use {usable_cores()} CPUs" in said and said.count("no config.json") == 2
    assert "--threads 1: the gain" in said


@pytest.mark.slow
def test_profile_of_a_training_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    options = f"{TINY} --threads 1 --profile --engines megatron-lean,megatron-fp32 --json {file}"
    assert train.main(options.split()) == 0
    lean, plain = json.loads(file.read_text())
    assert (lean["engine"], plain["engine"]) == ("megatron, bf16 moments", "megatron, fp32")
    assert {op["phase"] for op in plain["ops"]} == {"forward", "backward", "update"}
    assert {op["phase"] for op in lean["ops"]} == {"forward", "recompute", "backward", "update"}
    assert 0 < plain["explained"] <= 1
    # The products are all of the model's, and each is found where its weight is, forward and backward.
    forward, backward = (_flops(plain, phase) for phase in ("forward", "backward"))
    hf = parsed(small_config(64, 2, 8, 64))
    batch = [32] * 3
    assert sum(forward.values()) + sum(backward.values()) == pytest.approx(matmul_flops(hf, batch), rel=0.05)
    for part in ("output_layer", "decoder.layers.mlp.experts", "decoder.layers.mlp.linear_fc1"):
        assert backward[part] == 2 * forward[part] > 0
    assert "megatron, fp32: a step of" in capsys.readouterr().out


@pytest.mark.slow
def test_whole_steps_of_a_new_process_in_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    sizes = "--num-prompts 2 --samples 2 --new-tokens 4 --prompt-lengths 4 8 --steps 2 --rounds 2 --threads 1"
    assert step.main(f"{sizes} --json {file}".split()) == 0
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert len(row["steps"]) == 4 and all(one["num_tokens"] == 16 for one in row["steps"])
    assert row["seconds"] > row["generate_seconds"] > 0 and report["ratios"] == {}
    assert step.main(["--steps", "0", "--rounds", "0", "--engines", "ours", "trl"]) == 2
    said = capsys.readouterr().err
    assert all(text in said for text in ("--steps must be", "--rounds must be", "--trl-python is absent"))


def _flops(profile: dict, phase: str) -> dict[str, float]:
    """Floating-point operations of the phase by part of the model."""
    found: dict[str, float] = {}
    for op in profile["ops"]:
        if op["phase"] == phase:
            found[op["part"]] = found.get(op["part"], 0.0) + op["flops"]
    return found


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--engines", "megatron,deepspeed"]) == 2
    assert "deepspeed" in capsys.readouterr().err


def test_work_of_a_step() -> None:
    hf = parsed(small_config(64, 2, 8, 64))
    lengths = mixed_lengths(200, 64, 0)
    assert sum(lengths) >= 200 and max(lengths) <= 64
    # Twice the sequences are twice the work; one sequence of twice the length is more than that.
    assert matmul_flops(hf, [16, 16]) == 2 * matmul_flops(hf, [16]) < matmul_flops(hf, [32])
    assert Batch(((1, 2), (3,))).num_tokens == 3


def test_scale_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scale, "LAYOUTS", {256: scale.LAYOUTS[256]})
    assert scale.main([]) == 0
    assert "members of every group" in capsys.readouterr().out


def test_data_plane_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    options = f"--prompts 4 --samples 2 --lengths 3 5 --ranks 4 --processes 1 --rounds 1 --json {file}"
    with forked_workers():
        assert data_plane.main(options.split()) == 0
    sent = {(cost["phase"], cost["way"]): cost["megabytes"] * 1e6 for cost in json.loads(file.read_text())}
    assert len(sent) == 7
    # Of each of 8 rows: four references of 12 bytes and one advantage; or ids and masks int64, log-probs, advantages.
    assert sent["dispatch", "by reference"] == pytest.approx(8 * (4 * 12 + 4))
    assert sent["dispatch", "through the controller"] == pytest.approx(8 * (8 * 16 + 5 * (8 + 4 + 4)))
    assert "times that" in capsys.readouterr().out
