"""Greedy tokens equal transformers' whatever the engine does meanwhile: requests that arrive at random, preemption, any
chunk of a prompt, prefix caching, other ranks.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.mindspeed_llm.tiny import (
    tiny_moonlight_config,
    tiny_qwen3_config,
    tiny_v2_lite_config,
    write_tiny_checkpoint,
)
from tests.parallel.launcher import run_ranks
from tests.vllm.test_parity import check_greedy
from tests.vllm.tiny import hf_model, write_checkpoint
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt

VOCABULARY, MAX_LEN, NUM_ARRIVALS = 128, 96, 24
MODELS: dict[str, dict[str, Any] | None] = {
    "deepseek-v3": None,
    "qwen3": tiny_qwen3_config(),
    "deepseek-v2": tiny_v2_lite_config(n_group=4, topk_group=2, topk_method="group_limited_greedy"),
    "moonlight": tiny_moonlight_config(),
}
CACHED, UNCACHED = {"enable_prefix_caching": True}, {"enable_prefix_caching": False}
TIGHT = {"block_size": 4, "num_gpu_blocks_override": 26, "max_num_batched_tokens": 24}
WAYS: dict[str, dict[str, Any]] = {
    "tokens one by one": {"max_num_seqs": 1, "max_num_batched_tokens": 1} | UNCACHED,
    "chunks of 1 to 8": {"max_num_batched_tokens": 8} | CACHED,
    "chunks of 1 to 37": {"max_num_batched_tokens": 37} | UNCACHED,
    "whole prompts": {"max_num_batched_tokens": 512, "block_size": 4} | CACHED,
    "preempted": TIGHT | UNCACHED,
    "preempted, cached": TIGHT | CACHED,
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2, "max_num_batched_tokens": 16},
    "tp2, preempted": {"tensor_parallel_size": 2} | TIGHT,
}
SHARED_EXPERTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {"data_parallel_size": 2, "enable_expert_parallel": True, "max_num_batched_tokens": 16},
    "dp2 ep2, preempted": {"data_parallel_size": 2, "enable_expert_parallel": True} | TIGHT,
    "tp2 ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_exchange": "dispatch"},
    "tp2 ep2, tokens shared out": {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "expert_exchange": "dispatch",
        "use_sequence_parallel_moe": True,
    },
}


def prompts(count: int) -> list[list[int]]:
    """1 to 60 tokens; every third one begins as another one does."""
    rng = random.Random(3)
    found: list[list[int]] = []
    for index in range(count):
        shared = rng.choice(found)[: rng.randint(1, 40)] if index % 3 == 2 else []
        found.append(shared + [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 60 - len(shared)))])
    return found


def generate(path: str, count: int, **arguments: Any) -> dict[int, RequestOutput]:
    """This replica's prompts by their number; request i arrives before one of the first steps, drawn by its number."""
    defaults = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "block_size": 8}
    llm = LLM(path, skip_tokenizer_init=True, **(defaults | arguments))
    parallel, rng = llm.config.parallel, random.Random(5)
    arrivals = [rng.randrange(NUM_ARRIVALS) for _ in range(count)]
    mine = range(parallel.replica, count, parallel.data_parallel_size)
    outputs, step = {}, 0
    inputs = prompts(count)
    # Replicas that share experts step together, so each takes as many steps until the last request has arrived.
    while step < NUM_ARRIVALS or llm.engine.has_unfinished_requests():
        for index in (i for i in mine if arrivals[i] == step):
            params = SamplingParams(temperature=0, max_tokens=12 + index % 19, ignore_eos=True)
            llm.engine.add_request(str(index), TokensPrompt(prompt_token_ids=inputs[index]), params)
        outputs |= {int(output.request_id): output for output in llm.engine.step()}
        step += 1
    if arguments.get("num_gpu_blocks_override"):
        assert llm.core.scheduler.num_preemptions > 0
    if arguments.get("enable_prefix_caching"):
        assert any(output.num_cached_tokens for output in outputs.values())
    llm.shutdown()
    assert sorted(outputs) == list(mine)
    return outputs


def generate_all(path: str, count: int, ways: dict[str, dict[str, Any]]) -> dict[str, dict[int, RequestOutput]]:
    return {name: generate(path, count, **arguments) for name, arguments in ways.items()}


def checkpoint(name: str, folder: Path) -> str:
    config = MODELS[name]
    if config is None:
        return write_checkpoint(folder, vocab_size=VOCABULARY)
    write_tiny_checkpoint(folder, config, seed=3)
    return str(folder)


def compare(name: str, folder: Path, count: int, ways: dict[str, dict[str, Any]], world_size: int) -> None:
    """A token may differ from transformers' only where its two best are within 1e-4, which hardly ever is."""
    path = checkpoint(name, folder)
    results = run_ranks(generate_all, world_size, path, count, ways, timeout_s=600) if world_size > 1 else None
    of_ranks = results or [generate_all(path, count, ways)]
    reference = hf_model(path)
    checked: dict[int, list[int]] = {}
    num_ties = 0
    for way in ways:
        outputs: dict[int, RequestOutput] = {}
        for result in of_ranks:
            outputs |= result[way]
        assert len(outputs) == count, way
        new = [o for i, o in outputs.items() if checked.get(i) != o.outputs[0].token_ids]
        num_ties += check_greedy(reference, new) if new else 0
        checked = {i: o.outputs[0].token_ids for i, o in outputs.items()}
    assert num_ties <= 2 * len(ways), num_ties


@pytest.mark.parametrize(
    ("name", "ways"), [("deepseek-v3", list(WAYS)), ("qwen3", ["chunks of 1 to 37", "preempted, cached"])]
)
def test_greedy_tokens_equal_transformers(name: str, ways: list[str], tmp_path: Path) -> None:
    """Every way with every model: test_256_prompts."""
    compare(name, tmp_path, 12, {way: WAYS[way] for way in ways}, 1)


def test_greedy_tokens_of_two_ranks_equal_transformers(tmp_path: Path) -> None:
    compare("deepseek-v3", tmp_path, 12, TWO_RANKS | SHARED_EXPERTS, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODELS)
def test_256_prompts(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, 256, WAYS, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODELS)
def test_256_prompts_on_two_ranks(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, 256, TWO_RANKS if name == "qwen3" else TWO_RANKS | SHARED_EXPERTS, 2)
