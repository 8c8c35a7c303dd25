"""Every grouped-query family over four ranks: gradients as transformers', weights and shards as they were loaded, and
the same weights in the rollout engine.

The families with latent attention have such tests beside the converter, the training engine and the weight sync.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_formats.config import parse_hf_config
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from tests.megatron.model_helpers import PackedBatch, packed_batch
from tests.mindspeed_llm.test_conversion import shard, unshard
from tests.mindspeed_llm.test_export import weights_and_gradients
from tests.mindspeed_llm.test_layout_parity import LENGTHS, gradients
from tests.mindspeed_llm.tiny import tiny_weights, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.tiny_models import CONFIGS, PLAIN, write_model
from tests.verl.test_weight_sync import params_of, synced
from tests.vllm.fp8_tiny import dequantized, fp8_tensors, write_directory
from tests.vllm.test_models import build, prompts
from vllm import SamplingParams

GROUPED = [name for name in PLAIN if not parse_hf_config(CONFIGS[name]).is_mla]
UNEVEN = {"num_layer_list": (2, 1)}
# The models have two heads of keys and values: with TP 4 two ranks share one.
DENSE = {
    "tp4": ParallelLayout(4, 4),
    "tp2 pp2": ParallelLayout(4, 2, 2, **UNEVEN),
    "cp2 dp2": ParallelLayout(4, context_parallel_size=2),
}
EXPERTS = {
    "tp4, an expert on every rank": ParallelLayout(4, 4, expert_model_parallel_size=4),
    "tp2 pp2 ep2": ParallelLayout(4, 2, 2, expert_model_parallel_size=2, **UNEVEN),
    "cp2 dp2 ep4": ParallelLayout(4, context_parallel_size=2, expert_model_parallel_size=4),
    "tp2 etp2 ep2": ParallelLayout(4, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=2),
}


def layouts_of(name: str) -> dict[str, ParallelLayout]:
    return EXPERTS if parse_hf_config(CONFIGS[name]).num_moe_layers else DENSE


# One layout of each model by default; those of --all are the others.
FIRST = {(name, list(layouts_of(name))[number % 2]) for number, name in enumerate(GROUPED)}
REST = {(name, key) for name in GROUPED for key in layouts_of(name)} - FIRST
Cases = dict[tuple[str, str], tuple[str, ParallelLayout]]


def on_this_rank(cases: Cases, batch: PackedBatch) -> dict[tuple[str, str], tuple[dict[str, torch.Tensor], list[str]]]:
    """Of every case the gradients, and the names of tensors that come out unlike they went in."""
    return {
        case: (gradients(path, layout, {}, batch), weights_and_gradients(path, layout))
        for case, (path, layout) in cases.items()
    }


@pytest.mark.parametrize("chosen", [FIRST, pytest.param(REST, marks=pytest.mark.slow)], ids=["some", "rest"])
def test_four_ranks_equal_transformers(chosen: set[tuple[str, str]], tmp_path: Path) -> None:
    from tests.mindspeed_llm.transformers_side import Theirs, largest_difference  # ranks need no transformers

    batch = packed_batch(LENGTHS, 128, seed=1)
    expected, paths = {}, {}
    for name in sorted({name for name, _ in chosen}):
        paths[name], theirs = write_model(tmp_path / name, name, seed=5)
        _, expected[name] = Theirs(theirs).gradients(batch)
    cases = {case: (str(paths[case[0]]), layouts_of(case[0])[case[1]]) for case in sorted(chosen)}
    for of_rank in run_ranks(on_this_rank, 4, cases, batch, timeout_s=300):
        for case, (found, wrong) in of_rank.items():
            assert wrong == [], case
            assert found.keys() == expected[case[0]].keys(), case
            worst = largest_difference(found, expected[case[0]])
            assert worst[0] < 1e-5, (case, worst)


@pytest.mark.parametrize("name", GROUPED)
def test_shards_return_the_checkpoint(name: str, tmp_path: Path) -> None:
    """HF -> shards of TP 4 on two uneven stages -> HF, bit for bit."""
    weights = write_tiny_checkpoint(tmp_path / "hf", CONFIGS[name], dtype=torch.bfloat16)
    flags = ["--target-tensor-parallel-size", "4", "--target-pipeline-parallel-size", "2", "--num-layer-list", "2,1"]
    if parse_hf_config(CONFIGS[name]).num_moe_layers:
        flags += ["--target-expert-parallel-size", "2", "--moe-grouped-gemm"]
    assert shard(tmp_path / "hf", tmp_path / "shards", *flags) == 0
    assert unshard(tmp_path / "shards", tmp_path / "again", tmp_path / "hf") == 0
    with HFCheckpoint(tmp_path / "again") as again:
        assert sorted(again.names()) == sorted(weights)
        assert all(torch.equal(again.read(name), tensor) for name, tensor in weights.items())


def sync_of_every_model(paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, path in paths.items():
        has_experts = parse_hf_config(CONFIGS[name]).num_moe_layers > 0
        layout = ParallelLayout(4, 2, 2, **({"expert_model_parallel_size": 2} if has_experts else {}), **UNEVEN)
        settings = {"tensor_model_parallel_size": 4, "dtype": "bfloat16", "enable_expert_parallel": has_experts}
        found[name] = synced(path, asdict(layout), "float32", settings, 0)
    return found


def test_engines_hold_the_trainer_s_weights(tmp_path: Path) -> None:
    """From TP 2, two stages and EP 2 to a rollout engine of TP 4 (and EP 4), with digests of every shard."""
    paths = {name: str(tmp_path / name) for name in GROUPED}
    for name, path in paths.items():
        write_tiny_checkpoint(path, CONFIGS[name], seed=1, dtype=torch.float32)
    for of_rank in run_ranks(sync_of_every_model, 4, paths, timeout_s=300):
        assert {name: seen["differences"] for name, seen in of_rank.items()} == {name: [] for name in GROUPED}


@pytest.mark.parametrize("name", GROUPED)
def test_fp8_weights_are_those_that_they_stand_for(name: str, tmp_path: Path) -> None:
    """Training reads them multiplied out; the rollout engine holds them in FP8."""
    stored = fp8_tensors(tiny_weights(CONFIGS[name]))
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values())
    paths = [
        write_directory(tmp_path / "fp8", stored, config=CONFIGS[name]),
        write_directory(tmp_path / "plain", dequantized(stored), config=CONFIGS[name]),
    ]
    fp8, plain = (params_of(path, ParallelLayout(4, 4), 1, torch.float32) for path in paths)
    assert fp8.keys() == plain.keys() and all(torch.equal(fp8[key], tensor) for key, tensor in plain.items())
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    (held, multiplied_out) = (build(path).generate(prompts(4, 30), params) for path in paths)
    for one, other in zip(held, multiplied_out, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].sampled_logprobs == pytest.approx(other.outputs[0].sampled_logprobs, abs=1e-5)
