"""The engine against transformers' DeepseekV3ForCausalLM, fp32, on the same checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.tiny import TINY, hf_logits, hf_model, write_checkpoint
from vllm import LLM, SamplingParams

NO_YARN: dict[str, Any] = {"rope_scaling": None}
VARIANTS = {
    "yarn": {},
    "no_q_lora": {"q_lora_rank": None, "rope_scaling": None},
    "mscales_differ": {"rope_scaling": TINY["rope_scaling"] | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "unnormalised": {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
}


def make_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, TINY["vocab_size"]) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def as_inputs(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": p} for p in prompts]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_of_every_position_equal_transformers(variant: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **VARIANTS[variant])
    reference = hf_model(path)
    llm = LLM(path, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=3, logprobs=TINY["vocab_size"])
    prompts = make_prompts(12, 100)
    outputs = llm.generate(as_inputs(prompts), params)
    sequences = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    worst = 0.0
    for output, logits in zip(outputs, hf_logits(reference, sequences), strict=True):
        expected = logits.log_softmax(-1)
        top_logprobs = output.outputs[0].top_logprobs
        assert top_logprobs is not None and len(top_logprobs) == 24
        for step, entry in enumerate(top_logprobs):
            got = torch.empty(TINY["vocab_size"])
            got[list(entry)] = torch.tensor([value.logprob for value in entry.values()])
            worst = max(worst, float((got - expected[len(output.prompt_token_ids) - 1 + step]).abs().max()))
    assert worst < 2e-5, worst


def test_greedy_tokens_of_64_prompts_equal_transformers(tmp_path: Path) -> None:
    """64 tokens of each prompt at least; requests enter and leave a batch of 16 at different times.

    A differing token is accepted only where transformers' top two are within 1e-4.
    """
    path = write_checkpoint(tmp_path)
    llm = LLM(path, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=96)
    prompts = make_prompts(64, 40, seed=1)
    lengths = [64 if i % 4 else 64 + random.Random(i).randint(1, 32) for i in range(64)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(as_inputs(prompts), params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    num_ties = check_greedy(hf_model(path), outputs)
    assert num_ties <= 2, num_ties


def check_greedy(reference: Any, outputs: list[Any]) -> int:
    """Compare every generated token with transformers' argmax after the same tokens; returns how many were ties."""
    sequences = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    num_ties = 0
    for output, logits in zip(outputs, hf_logits(reference, sequences), strict=True):
        predictions = logits[len(output.prompt_token_ids) - 1 : -1]
        for token, row in zip(output.outputs[0].token_ids, predictions, strict=True):
            if int(row.argmax()) != token:
                best, second = row.topk(2).values.tolist()
                assert best - second < 1e-4, (token, int(row.argmax()), best, second)
                num_ties += 1
    return num_ties


def test_chunked_prefill_equals_whole_prefill(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    prompts = as_inputs(make_prompts(9, 120, seed=2))
    params = SamplingParams(max_tokens=10, ignore_eos=True, seed=5)
    whole = LLM(path, skip_tokenizer_init=True, max_model_len=200, max_num_seqs=9, enable_chunked_prefill=False)
    expected = whole.generate(prompts, params)
    for budget in (9, 32):
        chunked = LLM(path, skip_tokenizer_init=True, max_model_len=200, max_num_seqs=9, max_num_batched_tokens=budget)
        assert_same(chunked.generate(prompts, params), expected)


def assert_same(outputs: list[Any], expected: list[Any], tolerance: float = 1e-5) -> None:
    for output, other in zip(outputs, expected, strict=True):
        for sample, other_sample in zip(output.outputs, other.outputs, strict=True):
            assert sample.token_ids == other_sample.token_ids
            assert sample.sampled_logprobs == pytest.approx(other_sample.sampled_logprobs, abs=tolerance)


def test_preemption_gives_the_same_tokens(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    prompts = as_inputs(make_prompts(16, 30, seed=4))
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=5)
    roomy = LLM(path, skip_tokenizer_init=True, max_model_len=80, max_num_seqs=16)
    tight = LLM(
        path, skip_tokenizer_init=True, max_model_len=80, max_num_seqs=16, block_size=4, num_gpu_blocks_override=40
    )
    assert_same(tight.generate(prompts, params), roomy.generate(prompts, params))
    assert tight.core.scheduler.num_preemptions > 0
    assert roomy.core.scheduler.num_preemptions == 0


def test_prefix_caching_shares_prompts_and_changes_nothing(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    shared = make_prompts(1, 1, seed=6)[0] * 20
    prompts = as_inputs([shared + p for p in make_prompts(6, 20, seed=7)])
    params = SamplingParams(n=4, max_tokens=12, ignore_eos=True, seed=11)
    plain = LLM(path, skip_tokenizer_init=True, max_model_len=80, max_num_seqs=8)
    cached = LLM(
        path, skip_tokenizer_init=True, max_model_len=80, max_num_seqs=8, block_size=4, enable_prefix_caching=True
    )
    expected = plain.generate(prompts, params)
    first = cached.generate(prompts, params)
    assert_same(first, expected)
    assert all(o.num_cached_tokens >= 3 * 20 for o in first)
    assert_same(cached.generate(prompts, params), expected)


def test_bfloat16_runs_close_to_fp32(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    prompts = as_inputs(make_prompts(4, 20))
    params = SamplingParams(max_tokens=1, seed=0)
    exact = LLM(path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4).generate(prompts, params)
    rough = LLM(path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, dtype="bfloat16")
    for output, other in zip(rough.generate(prompts, params), exact, strict=True):
        if output.outputs[0].token_ids == other.outputs[0].token_ids:
            assert output.outputs[0].sampled_logprobs == pytest.approx(other.outputs[0].sampled_logprobs, abs=0.5)
