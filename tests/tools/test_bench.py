"""The benchmarks run and report what they measured; their figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.vllm.serving import write_served_checkpoint
from tools.workshop.bench import speculation, step, train
from tools.workshop.bench.models import Batch, matmul_flops, parsed, small_config, update_flops

TINY = "--hidden-size 64 --num-layers 2 --num-experts 8 --vocab-size 64 --tokens 96 --length 32 --micro-tokens 64"


# Each engine is a process of its own, which imports what it measures.
@pytest.mark.slow
def test_training_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    groups = "megatron-lean,transformers-bf16 megatron-fp32"
    options = f"{TINY} --threads 1 --steps 1 --engines {groups} --json {file}"
    assert train.main(options.split()) == 0
    reports = json.loads(file.read_text())
    rows = [row for report in reports for row in report["rows"]]
    assert [row["engine"].split(",")[0] for row in rows] == ["megatron", "transformers", "megatron"]
    assert all(row["tokens_per_s"] > 0 and row["peak_bytes"] > 0 and row["matmul_use"] > 0 for row in rows)
    # Random ids, nearly untrained: every engine sees a loss of about ln(64).
    assert all(row["losses"][-1] == pytest.approx(4.16, abs=0.3) for row in rows)
    assert capsys.readouterr().out.count("x peak memory") == 1


@pytest.mark.slow
def test_whole_steps_of_a_new_process_in_every_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    sizes = "--num-prompts 2 --samples 2 --new-tokens 4 --prompt-lengths 4 8 --steps 2 --rounds 2 --threads 1"
    assert step.main(f"{sizes} --json {file}".split()) == 0
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert len(row["steps"]) == 4 and all(one["num_tokens"] == 16 for one in row["steps"])
    assert row["seconds"] > row["generate_seconds"] > 0
    assert [0 < ratio < 1 for ratio in report["ratios"].values()] == [True], "our update has a least time"
    assert step.main(["--steps", "0", "--rounds", "0", "--engines", "ours", "trl"]) == 2
    said = capsys.readouterr().err
    assert all(text in said for text in ("--steps must be", "--rounds must be", "--trl-python is absent"))


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--engines", "megatron,deepspeed"]) == 2
    assert "deepspeed" in capsys.readouterr().err


def test_work_of_a_step() -> None:
    hf = parsed(small_config(64, 2, 8, 64))
    # Twice the sequences are twice the work; one sequence of twice the length is more than that.
    assert matmul_flops(hf, [16, 16]) == 2 * matmul_flops(hf, [16]) < matmul_flops(hf, [32])
    assert Batch(((1, 2), (3,))).num_tokens == 3
    # A prompt that two samples share is computed once, and its logits are not computed.
    whole, shared = matmul_flops(hf, [20, 20]), update_flops(hf, [16], 2, 4)
    assert shared < whole and update_flops(hf, [16, 16], 2, 4) == 2 * shared


def test_drafts_are_measured_beside_no_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    write_served_checkpoint(tmp_path / "model")
    lines = [json.dumps({"question": text}) + "\n" for text in ("one two", "two one", "one one")]
    (tmp_path / "questions.jsonl").write_text("".join(lines))
    options = ["--sequences", "2", "--new-tokens", "24", "--rounds", "1", "--ways", "ngram:2", "suffix:4"]
    assert speculation.main([str(tmp_path / "model"), str(tmp_path / "questions.jsonl"), *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [row[0] for row in rows] == ["off", "ngram:2", "suffix:4"] * 2
    assert all(int(row[5]) > 0 for row in rows)
