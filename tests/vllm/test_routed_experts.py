"""The experts that a generation reports for every token are those that transformers' routers choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.mindspeed_llm.tiny import tiny_qwen3_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.vllm.capturing_platform import DEVICE as CAPTURING
from tests.vllm.gathering_ops import PROVIDER as GATHERING
from tests.vllm.test_parity import as_inputs, make_prompts
from tests.vllm.tiny import TINY, hf_model, write_checkpoint
from vllm import LLM, CompletionOutput, SamplingParams
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.engine.rebalancer import exchange_objects
from vllm.v1.request import Request

TIGHT = {"block_size": 4, "num_gpu_blocks_override": 34}
EXPERTS = {"enable_expert_parallel": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"enable_prefix_caching": False},
    "preempted": TIGHT | {"enable_prefix_caching": False},
    "prefix caching": {"block_size": 4, "enable_prefix_caching": True},
    "preempted, prefix caching": TIGHT | {"enable_prefix_caching": True},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "recorded": {"enforce_eager": False, "device": CAPTURING},
}
LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "expert_exchange": "dispatch"} | EXPERTS,
    {"tensor_parallel_size": 2, "expert_exchange": "dispatch", "use_sequence_parallel_moe": True} | EXPERTS,
    {"tensor_parallel_size": 2, "expert_exchange": "dispatch", "rollout_ops": GATHERING} | EXPERTS | WAYS["recorded"],
    {"data_parallel_size": 2} | EXPERTS,
    {"data_parallel_size": 2, "expert_exchange": "dispatch", "rebalance_interval": 2} | EXPERTS,
    {"data_parallel_size": 2, "rebalance_interval": 2},
]


def samples_of(path: str, prompts: slice = slice(None), **arguments: Any) -> list[tuple[list[int], CompletionOutput]]:
    """(all tokens, sample) of each sample of six prompts; some share all of their prompt."""
    defaults = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    llm = LLM(
        path, skip_tokenizer_init=True, enable_return_routed_experts=True, **(defaults | {"block_size": 8} | arguments)
    )
    params = [SamplingParams(n=2, max_tokens=6 + 4 * i, ignore_eos=True, seed=i) for i in range(6)]
    inputs = as_inputs(make_prompts(6, 40, seed=4))
    outputs = llm.generate(inputs[prompts], params[prompts])
    if arguments == WAYS["preempted"]:
        assert llm.core.scheduler.num_preemptions > 0
    if "rebalance_interval" in arguments:
        assert llm.engine.rebalancer.num_moves > 0
    llm.shutdown()
    return [(o.prompt_token_ids + s.token_ids, s) for o in outputs for s in o.outputs]


@torch.no_grad()
def expected_routes(path: str, sequences: list[list[int]]) -> list[torch.Tensor]:
    """[tokens, M, K] of each sequence, the experts ascending."""
    model, routes = hf_model(path), []
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, inputs: routes.append(inputs[1].sort(dim=-1).values))
    found = []
    for ids in sequences:
        routes.clear()
        model(input_ids=torch.tensor([ids]), use_cache=False)
        found.append(torch.stack(routes, dim=1))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(path: str) -> list[tuple[list[int], torch.Tensor]]:
    sequences = [ids for ids, _ in samples_of(path)]
    return list(zip(sequences, expected_routes(path, sequences), strict=True))


def assert_routes(
    found: list[tuple[list[int], CompletionOutput]], expected: list[tuple[list[int], torch.Tensor]]
) -> None:
    for (ids, sample), (expected_ids, routes) in zip(found, expected, strict=True):
        assert ids == expected_ids
        chosen = sample.routed_experts
        assert chosen is not None and chosen.dtype == np.uint8
        assert chosen.shape == (len(ids) - 1, 2, TINY["num_experts_per_tok"])
        assert np.array_equal(np.sort(chosen, axis=-1), routes[:-1].numpy())


@pytest.mark.parametrize("way", WAYS)
def test_choices_are_those_of_transformers(way: str, path: str, expected: list[tuple[list[int], torch.Tensor]]) -> None:
    assert_routes(samples_of(path, **WAYS[way]), expected)


def samples_of_layouts(path: str) -> list[list[tuple[list[int], CompletionOutput]]]:
    found = []
    for layout in LAYOUTS:
        is_replica = "data_parallel_size" in layout
        share = slice(None, 1) if torch.distributed.get_rank() == 0 else slice(1, None)
        found.append(samples_of(path, share if is_replica else slice(None), **layout))
    return found


def test_two_ranks_report_what_one_does(path: str, expected: list[tuple[list[int], torch.Tensor]]) -> None:
    """Also of requests that ended on the other replica."""
    for rank, results in enumerate(run_ranks(samples_of_layouts, 2, path, timeout_s=120)):
        for layout, found in zip(LAYOUTS, results, strict=True):
            share = slice(None, 2) if rank == 0 else slice(2, None)
            assert_routes(found, expected[share] if "data_parallel_size" in layout else expected)


def test_without_the_option_nothing_is_kept(path: str, tmp_path: Path) -> None:
    llm = LLM(path, skip_tokenizer_init=True, max_model_len=32, max_num_seqs=2)
    (output,) = llm.generate(as_inputs([[5, 6]]), SamplingParams(max_tokens=3))
    assert output.outputs[0].routed_experts is None
    assert len(llm.core.worker.cache.caches) == TINY["num_hidden_layers"]
    write_tiny_checkpoint(tmp_path, tiny_qwen3_config())
    with pytest.raises(ValueError, match="enable_return_routed_experts=True: Qwen3ForCausalLM has no experts"):
        LLM(str(tmp_path), skip_tokenizer_init=True, enable_return_routed_experts=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_choices_survive_the_way_to_another_replica(dtype: type) -> None:
    request = Request("a", [1, 2, 3], max_tokens=9)
    request.append(4, -1.0)
    request.home, request.routed_experts = (1, 2), np.arange(3 * 2 * 3, dtype=dtype).reshape(3, 2, 3)
    (back,) = exchange_objects(GroupCoordinator(0, 1, None), [[request]], torch.device("cpu"))
    assert back.routed_experts is not None and back.routed_experts.dtype == dtype
    assert np.array_equal(back.routed_experts, request.routed_experts)
