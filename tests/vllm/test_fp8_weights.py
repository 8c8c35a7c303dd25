"""Weights in FP8 blocks: FP8 checkpoints, and quantising weights that arrive in other forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_formats.fp8 import SCALE_SUFFIX
from tests.parallel.launcher import run_ranks
from tests.vllm.fp8_tiny import WIDE, dequantized, fp8_tensors, wide_weights, write_directory
from tests.vllm.test_lifecycle import build, tokens_of
from tests.vllm.test_parity import as_inputs, assert_same, make_prompts
from tests.vllm.test_update_weights import digests
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.digest import differences

UP = "model.layers.1.mlp.experts.3.up_proj.weight"
PARAMS = SamplingParams(max_tokens=6, seed=2, ignore_eos=True)


def outputs_of(llm: LLM) -> list[Any]:
    return llm.generate(as_inputs(make_prompts(5, 20)), PARAMS)


def test_an_fp8_checkpoint_runs_as_it_is_stored_or_multiplied_out(tmp_path: Path) -> None:
    stored = fp8_tensors(wide_weights())
    plain = dequantized(stored)
    path = write_directory(tmp_path / "fp8", stored)
    reference = build(write_directory(tmp_path / "plain", plain), dtype="float32")
    expected = outputs_of(reference)
    held = build(path, dtype="float32")
    assert not differences(digests(stored), held.weights_digest())
    assert_same(outputs_of(held), expected, tolerance=0)
    out = build(path, dtype="float32", quantization="dequantize")
    assert not differences(digests(plain), out.weights_digest())
    assert_same(outputs_of(out), expected, tolerance=0)
    assert held.get_memory_report()["weights_bytes"] < 0.5 * out.get_memory_report()["weights_bytes"]
    held.update_weights(stored.items())
    out.update_weights(stored.items())
    for llm in (held, out):
        assert_same(outputs_of(llm), expected, tolerance=0)


def test_weights_are_quantised_on_arrival_and_survive_sleep(tmp_path: Path) -> None:
    first, second = wide_weights(), wide_weights(seed=1)
    path = write_directory(tmp_path / "plain", first)
    llm = build(path, dtype="float32", quantization="fp8")
    stored, expected = fp8_tensors(first), tokens_of(llm)
    assert not differences(digests(stored), llm.weights_digest())
    awake = llm.get_memory_report()["weights_bytes"]
    llm.sleep(1)
    asleep = llm.get_memory_report()
    assert (asleep["weights_bytes"], asleep["host_weights_bytes"]) == (0, awake)
    llm.wake_up()
    assert not differences(digests(stored), llm.weights_digest()) and tokens_of(llm) == expected
    llm.sleep(2)
    llm.wake_up()
    llm.update_weights(second.items())
    assert not differences(digests(fp8_tensors(second)), llm.weights_digest())
    second[UP][0, 0] = float("inf")
    with pytest.raises(ValueError, match=rf"{UP}: the weight of shape \(144, 200\) holds inf"):
        llm.update_weights(second.items())


def run_layouts(path: str, plain: str, layouts: list[dict[str, Any]]) -> list[Any]:
    found = []
    for layout in layouts:
        for directory in (path, plain):
            llm = build(directory, dtype="float32", quantization="fp8", **layout)
            found.append((llm.weights_digest(), outputs_of(llm)))
            llm.shutdown()
    return found


def test_every_layout_holds_the_same_blocks(tmp_path: Path) -> None:
    weights = wide_weights()
    stored = fp8_tensors(weights)
    path, plain = write_directory(tmp_path / "fp8", stored), write_directory(tmp_path / "plain", weights)
    alone = outputs_of(build(path, dtype="float32"))
    layouts: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ]
    for found in run_ranks(run_layouts, 2, path, plain, layouts):
        for digest_of_layout, outputs in found:
            assert not differences(digests(stored), digest_of_layout)
            assert_same(outputs, alone, tolerance=1e-5)


def test_bfloat16_products_take_blocks_rounded_once(tmp_path: Path) -> None:
    stored = fp8_tensors(wide_weights())
    held = build(write_directory(tmp_path / "fp8", stored), dtype="bfloat16")
    out = build(write_directory(tmp_path / "plain", dequantized(stored)), dtype="bfloat16")
    assert_same(outputs_of(held), outputs_of(out), tolerance=0)


def test_scales_may_come_first_or_later_but_must_come_and_be_positive(tmp_path: Path) -> None:
    stored = fp8_tensors(wide_weights())
    llm = build(write_directory(tmp_path, stored), dtype="float32")
    for order in (list(reversed(stored.items())), sorted(stored.items(), key=lambda p: p[0].endswith(SCALE_SUFFIX))):
        llm.update_weights(order)
    assert not differences(digests(stored), llm.weights_digest())
    assert llm.load_weights([(UP, stored[UP])]) == set()
    with pytest.raises(ValueError, match=f"without their scales .*{UP}"):
        llm.check_weights_loaded()
    assert llm.load_weights([(UP + SCALE_SUFFIX, stored[UP + SCALE_SUFFIX])]) == {UP}
    llm.check_weights_loaded()
    zero = stored[UP + SCALE_SUFFIX].clone()
    zero[1, 0] = 0
    for bad, message in (
        (stored | {UP + SCALE_SUFFIX: zero}, r"is 0.0 for block \(1, 0\)"),
        (stored | {UP + SCALE_SUFFIX: zero[:1]}, r"has shape \(1, 2\).*needs \(2, 2\)"),
        ({name: t for name, t in stored.items() if name != UP + SCALE_SUFFIX}, f"without their scales .*{UP}"),
        (stored | {UP: stored[UP].to(torch.float8_e5m2)}, "float8_e5m2"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.update_weights(bad.items())


def test_other_quantisations_are_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path, fp8_tensors(wide_weights()))
    with pytest.raises(ValueError, match="quantization='int4' is unknown, expected one of fp8, dequantize"):
        build(path, quantization="int4")
    other = WIDE | {"quantization_config": {"quant_method": "awq", "weight_block_size": [64, 64]}}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"quant_method='awq'[\s\S]*weight_block_size=\[64, 64\]"):
        build(path)
