"""The rollout and step benchmarks run and report what they measured; their figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.plan.model_work import model_work, train_flops_per_token
from tools.workshop.bench import rollout, step
from tools.workshop.bench.models import CHECKPOINTS, Work, decode_work, parsed, prefill_work, read_weights
from tools.workshop.bench.rollout_report import report

TINY = "--threads 1 --num-prompts 4 --prompt-lengths 2 5 --new-tokens 8"


@pytest.mark.parametrize(
    ("ops", "works", "failing"),
    [
        pytest.param(
            "--rollout-ops vllm.ops.reference:rollout_ops",
            ["mixed", "shared", "unshared", "prefill"],
            ["vllm"],
            marks=pytest.mark.slow,
        ),
        # Our kernels, compiled anew, which a step of ours runs; and text.
        pytest.param("", ["mixed", "shared", "unshared", "prefill", "host3"], [], marks=pytest.mark.slow),
    ],
)
def test_rollout_beside_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ops: str, works: list[str], failing: list[str]
) -> None:
    """An engine that fails is reported, and the others go on."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho there is nothing here >&2\nexit 1\n")
    python.chmod(0o755)
    file = tmp_path / "report.json"
    sizes = f"--works {' '.join(works)} --host-sequences 3 --long-prompt 12 --samples 2"
    engines = f"--engines {' '.join(failing)} ours transformers --vllm-python {python} --variants eager,grouped_mm"
    options = f"{TINY} --checkpoints tiny --dtype float32 {engines}"
    status = rollout.main(f"{options} {ops} {sizes} --rounds 1 --starts 1 --json {file}".split())
    [found] = json.loads(file.read_text())
    assert status == bool(failing) and list(found["failures"]) == failing
    printed = capsys.readouterr().out
    assert all("there is nothing here" in error for error in found["failures"].values())
    assert ("nothing" in printed) == bool(failing)
    both = ["ours", "transformers"]
    kinds = [(row["engine"], row["work"]) for row in found["rows"]]
    assert kinds == [(engine, work) for work in works for engine in both]
    for row in found["rows"]:
        assert row["tokens_per_s"] > 0 and row["peak_bytes"] > 0 and row["cpu_seconds"][0] > 0
        assert row["work"] == "prefill" or 0 < row["host_us"] < row["step_us"]
    assert {start["engine"] for start in found["starts"] if start["ready_seconds"]} == set(both)
    assert "gain by sharing prompts, ours" in printed


@pytest.mark.slow
def test_a_step_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert step.main(f"{TINY} --checkpoint tiny --samples 2 --steps 1 --json {file}".split()) == 0
    [row] = json.loads(file.read_text())["rows"]
    assert row["generate_seconds"] + row["update_seconds"] < row["seconds"]
    assert 0 < row["reward"] < 1 and row["steps"][0]["grad_norm"] > 0
    assert "s/step" in capsys.readouterr().out


def test_what_cannot_run_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engines", "vllm", "sglang", "--checkpoints", "D", "--vllm-python", "/nowhere/python"]
    assert rollout.main(options) == 2
    errors = capsys.readouterr().err
    assert "sglang" in errors and "--checkpoints has D" in errors and "/nowhere/python" in errors
    assert step.main(["--engines", "trl", "--checkpoint", "D"]) == 2
    assert "--trl-python is absent" in capsys.readouterr().err


def test_least_work() -> None:
    hf = parsed(CHECKPOINTS["B"])
    # 64 tokens choose all experts with near certainty, one token its own.
    assert read_weights(hf, 64) == pytest.approx(read_weights(hf, 10_000), rel=1e-3)
    assert read_weights(hf, 1) == pytest.approx(train_flops_per_token(model_work(hf), 0) / 2)
    one, two = (decode_work(hf, 2, 64, context) for context in (100, 200))
    samples = decode_work(hf, 2, 64, 200, common=63 * 100)  # of a prompt of 100 tokens, which is read once
    assert samples.flops == two.flops
    assert two.num_bytes - samples.num_bytes == pytest.approx(63 / 64 * (two.num_bytes - one.num_bytes))
    assert two.num_bytes - one.num_bytes == 2 * 64 * 100 * 8 * (256 + 32)
    assert one.seconds(50e9, 1e12) == max(one.num_bytes / 50e9, one.flops / 1e12)
    assert prefill_work(hf, 2, [64, 64]).flops < prefill_work(hf, 2, [128]).flops


def test_every_problem_of_the_options_is_printed_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout.main(["--engines", "vllm", "--works", "nothing", "--starts", "0"]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in ("--works has nothing; known: ", "--vllm-python is absent", "--starts is 0"))


def test_prompts_are_the_same_for_a_seed_and_new_for_another() -> None:
    work = Work("mixed", 5, 2, 9)
    first, again, other = work.prompts(64, 1), work.prompts(64, 1), work.prompts(64, 2)
    assert first == again != other
    assert all(2 <= len(ids) <= 9 and min(ids) >= 2 and max(ids) < 64 for ids in first)


def test_figures_are_medians() -> None:
    def round_(seconds: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "cpu_seconds": seconds,
            "peak_bytes": 7,
            "num_tokens": 100,
            "step_us": [1000] * 100,
            "host_us": [110] * 100,
            "host_cpu_us": [100] * 100,
        }

    work = Work("mixed", 1, 4, 4, new_tokens=100)
    measured = [
        {
            "engine": engine,
            "name": engine,
            "work": vars(work),
            "rounds": [round_(seconds) for seconds in (scale, 2 * scale, 9 * scale)],
            "others_cores": [0.0, 0.5, 1.0],
        }
        for engine, scale in (("ours", 1.0), ("other", 3.0))
    ]
    found = report(
        {"dtype": "float32", "checkpoint": "tiny"},
        measured,
        [{"engine": "ours", "ready_seconds": [1.0, 1.0], "first_token_seconds": [3.0, 2.0]}],
        [{"bytes_per_s": 1e9, "flops_per_s": 1e9}] * 3,
    )
    assert found["rows"][0]["tokens_per_s"] == 50 and found["rows"][0]["others_cores"] == 0.5
    assert found["rows"][0]["host_us"] == 110
    assert found["ratios"]["mixed: ours / other, tokens per second"] == pytest.approx(3)
    assert found["starts"][0]["warm_first_token_seconds"] == 2
