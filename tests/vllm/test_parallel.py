"""Every layout gives the tokens and log-probs of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.transformer.moe.router import _balanced_logits
from tests.parallel.launcher import run_ranks
from tests.vllm.capturing_platform import DEVICE as CAPTURING
from tests.vllm.gathering_ops import PROVIDER as GATHERING
from tests.vllm.tiny import TINY, write_checkpoint
from vllm.model_executor.layers.fused_moe import balanced_logits
from vllm.platforms.cpu import CpuPlatform

Result = list[tuple[list[int], list[float]]]
# Replicas get shares of different sizes, and in a second batch all but the first get nothing.
NUM_PROMPTS = 10


def settings() -> tuple[list[Any], list[Any]]:
    """Prompts and sampling parameters, both different for each prompt."""
    from tests.vllm.test_parity import as_inputs, make_prompts
    from vllm import SamplingParams

    prompts = as_inputs(make_prompts(NUM_PROMPTS, 20, seed=8))
    params = [
        SamplingParams(
            max_tokens=3 + 5 * i % 17, ignore_eos=True, seed=i, temperature=0.0 if i % 3 == 0 else 0.9, n=1 + i % 2
        )
        for i in range(NUM_PROMPTS)
    ]
    return prompts, params


def run_engines(path: str, layouts: list[tuple[dict[str, Any], list[list[int]]]]) -> list[list[Result]]:
    """For each (LLM arguments, prompts of each replica): (tokens, log-probs) of every sample of this replica's
    prompts.
    """
    from vllm import LLM

    results = []
    for llm_args, shares in layouts:
        llm = LLM(
            path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=24, **llm_args
        )
        prompts, params = settings()
        replica = llm.config.parallel.replica
        mine = shares[replica]
        outputs = llm.generate([prompts[i] for i in mine], [params[i] for i in mine])
        assert len(llm.generate(prompts[:1] if replica == 0 else [])) == (replica == 0)
        llm.shutdown()
        results.append([[(s.token_ids, s.sampled_logprobs) for s in o.outputs] for o in outputs])
    return results


ALL = list(range(NUM_PROMPTS))
SHARES = [[0, 3], [i for i in ALL if i not in (0, 3)]]
EXPERTS = {"enable_expert_parallel": True}
DISPATCH = EXPERTS | {"expert_exchange": "dispatch"}
SHARES_TOKENS = DISPATCH | {"use_sequence_parallel_moe": True}
GATHERED = {"rollout_ops": GATHERING, "enforce_eager": False, "device": CAPTURING}  # decode steps as graphs
LAYOUTS: dict[int, list[tuple[dict[str, Any], list[list[int]]]]] = {
    2: [
        ({"tensor_parallel_size": 2}, [ALL]),
        ({"tensor_parallel_size": 2} | EXPERTS, [ALL]),
        ({"data_parallel_size": 2} | EXPERTS, SHARES),
        ({"tensor_parallel_size": 2} | DISPATCH, [ALL]),
        ({"data_parallel_size": 2} | DISPATCH, SHARES),
        ({"tensor_parallel_size": 2} | SHARES_TOKENS, [ALL]),
    ],
    4: [
        ({"tensor_parallel_size": 2, "data_parallel_size": 2} | EXPERTS, SHARES),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2} | DISPATCH, SHARES),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2} | SHARES_TOKENS, SHARES),
        ({"tensor_parallel_size": 4} | SHARES_TOKENS, [ALL]),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2} | SHARES_TOKENS | GATHERED, SHARES),
        ({"tensor_parallel_size": 2}, SHARES),  # two engines that know nothing of each other
    ],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(checkpoint: str) -> list[Result]:
    return run_engines(checkpoint, [({}, [ALL])])[0]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_layouts_equal_one_process(world_size: int, checkpoint: str, alone: list[Result]) -> None:
    layouts = LAYOUTS[world_size]
    for rank, results in enumerate(run_ranks(run_engines, world_size, checkpoint, layouts, timeout_s=150)):
        for (llm_args, shares), result in zip(layouts, results, strict=True):
            for index, samples in zip(shares[rank // llm_args.get("tensor_parallel_size", 1)], result, strict=True):
                for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(samples, alone[index], strict=True):
                    assert tokens == expected_tokens, (llm_args, rank, index)
                    assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


def balanced_loads_of(path: str, layouts: list[dict[str, Any]]) -> list[list[int]]:
    return [balanced_loads(path, llm_args) for llm_args in layouts]


def balanced_loads(path: str, llm_args: dict[str, Any]) -> list[int]:
    """How often each expert is chosen for eight prompts of eight tokens and four new ones each, all layers together."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        path, skip_tokenizer_init=True, max_model_len=32, force_load_balancing=True, enable_return_routed_experts=True,
        **llm_args,
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=list(range(1 + i, 9 + i))) for i in range(8)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True, seed=1))
    routed = [output.outputs[0].routed_experts for output in outputs]
    chosen = [int(expert) for experts in routed if experts is not None for expert in experts.flatten()]
    llm.shutdown()
    return [chosen.count(expert) for expert in range(TINY["n_routed_experts"])]


def test_forced_balance_gives_every_expert_the_same_load(checkpoint: str) -> None:
    alone = balanced_loads(checkpoint, {})
    assert max(alone) == min(alone) > 0, alone
    layouts = [{"tensor_parallel_size": 2} | args for args in (EXPERTS, DISPATCH, SHARES_TOKENS)]
    assert run_ranks(balanced_loads_of, 2, checkpoint, layouts, timeout_s=150) == [[alone, alone, alone]] * 2


def test_balanced_logits_are_those_of_training() -> None:
    """One formula in two engines that share no code."""
    logits_TE = torch.randn(12, 8)
    assert balanced_logits(logits_TE, 2).equal(_balanced_logits(logits_TE, 2))
    chosen_TK = balanced_logits(logits_TE[:4], 2, first_token=4).topk(2, dim=-1).indices.sort(-1).values
    assert chosen_TK.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


class _UnequalHost(CpuPlatform):
    """A host on which later ranks find more memory."""

    def kv_cache_budget_bytes(self, device: torch.device, utilization: float) -> int:
        return (1 + torch.distributed.get_rank()) << 20


def count_blocks(path: str) -> int:
    from vllm import LLM

    llm = LLM(path, skip_tokenizer_init=True, max_model_len=64, tensor_parallel_size=2, device=_UnequalHost())
    return llm.get_memory_report()["num_gpu_blocks"]


def test_ranks_of_a_replica_have_equal_caches(checkpoint: str) -> None:
    """Each has a scheduler of its own: with unequal numbers of blocks one would preempt where the other goes on."""
    first, second = run_ranks(count_blocks, 2, checkpoint)
    assert first == second > 0
