"""Penalties, limits and log-probs through the engine: as transformers has them, and the same in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vllm.test_parity import as_inputs, make_prompts
from tests.vllm.test_sampling import chi_square_is_plausible
from tests.vllm.tiny import TINY, hf_logits, hf_model, write_checkpoint
from vllm import LLM, SamplingParams

W = TINY["vocab_size"]
SIZES: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 96, "max_num_seqs": 6, "block_size": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return LLM(path, **SIZES, max_num_batched_tokens=40)


@pytest.fixture(scope="module")
def logits_of(path: str) -> Any:
    """fp32 [len, W] logits of a token list, by transformers."""
    model = hf_model(path)
    return lambda tokens: hf_logits(model, [tokens])[0]


def counts(tokens: list[int]) -> Tensor:
    return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=W).float()


def test_greedy_tokens_with_penalties_follow_their_formulas(llm: LLM, logits_of: Any) -> None:
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    prompts = make_prompts(3, 14, seed=6)
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **penalties)
        for penalties in (
            {"repetition_penalty": 1.4},
            {"frequency_penalty": 0.7, "presence_penalty": -0.4},
            {"repetition_penalty": 0.8, "frequency_penalty": 0.3, "presence_penalty": 1.1, "logit_bias": {9: 1.5}},
        )
    ]
    outputs = llm.generate(as_inputs(prompts), params)
    plain = llm.generate(as_inputs(prompts), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    for prompt, how, output, other in zip(prompts, params, outputs, plain, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens != other.outputs[0].token_ids
        model_TW = logits_of(prompt + tokens)[len(prompt) - 1 : -1]
        for i, token in enumerate(tokens):
            edited_W = model_TW[i].clone()
            for biased, bias in (how.logit_bias or {}).items():
                edited_W[biased] += bias
            repetition = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(how.repetition_penalty)])
            edited_W = repetition(torch.tensor([prompt + tokens[:i]]), edited_W[None])[0]
            count_W = counts(tokens[:i])
            edited_W -= how.frequency_penalty * count_W + how.presence_penalty * (count_W > 0)
            assert float(edited_W.max() - edited_W[token]) < 1e-4
        model_logprobs = model_TW.log_softmax(-1)[torch.arange(len(tokens)), tokens]
        assert output.outputs[0].sampled_logprobs == pytest.approx(model_logprobs.tolist(), abs=1e-4)


def test_min_p_draws_only_what_transformers_leaves(llm: LLM, logits_of: Any) -> None:
    from transformers import MinPLogitsWarper

    prompt = make_prompts(1, 12, seed=8)[0]
    params = SamplingParams(n=6, max_tokens=30, ignore_eos=True, seed=2, min_p=0.2, temperature=1.5)
    num_left = []
    for completion in llm.generate(as_inputs([prompt]), params)[0].outputs:
        scaled_TW = logits_of(prompt + completion.token_ids)[len(prompt) - 1 : -1] / 1.5
        left_TW = MinPLogitsWarper(min_p=0.2)(None, scaled_TW)
        assert bool(left_TW[torch.arange(30), completion.token_ids].isfinite().all())
        num_left.append(int(left_TW.isfinite().sum()))
    assert min(num_left) > 30


NUM_SAMPLES = 1500
SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.08},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "frequency and presence": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {3: 4.0, 50: -2.0}, "top_p": 0.9},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 160, 7)), "temperature": 1.4},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_frequencies_through_the_engine_pass_a_chi_square_test(name: str, path: str, logits_of: Any) -> None:
    """The second token of many samples, whose first is forced, so that it counts as output."""
    llm = LLM(path, **(SIZES | {"max_num_seqs": 256}))
    how, prompt, forced = SAMPLERS[name], make_prompts(1, 12, seed=3)[0], 9
    processor = llm.engine.processor
    group = processor.group("prompt", "0", as_inputs([prompt])[0], SamplingParams(n=NUM_SAMPLES, max_tokens=2, **how))
    requests = processor.samples([group], [0])
    for request in requests:
        request.append(forced, 0.0)
    llm.engine.run_requests(requests)
    tokens = torch.tensor([request.output_token_ids[1] for request in requests])

    logits_W = logits_of([*prompt, forced])[-1].clone()
    for token, bias in how.get("logit_bias", {}).items():
        logits_W[token] += bias
    seen = torch.tensor(sorted({*prompt, forced}))
    penalty = how.get("repetition_penalty", 1.0)
    logits_W[seen] = torch.where(logits_W[seen] > 0, logits_W[seen] / penalty, logits_W[seen] * penalty)
    logits_W[forced] -= how.get("frequency_penalty", 0.0) + how.get("presence_penalty", 0.0)
    banned_W = torch.ones(W, dtype=torch.bool)
    banned_W[torch.tensor(how.get("allowed_token_ids", list(range(W))))] = False
    probs_W = (logits_W.masked_fill(banned_W, float("-inf")) / how.get("temperature", 1.0)).softmax(-1)
    probs_W[probs_W < how.get("min_p", 0.0) * probs_W.max()] = 0
    ranked = probs_W.sort(descending=True)
    num_kept = min(how.get("top_k", W), int((ranked.values.cumsum(0) < how.get("top_p", 1.0)).sum()) + 1)
    probs_W[ranked.indices[num_kept:]] = 0
    assert chi_square_is_plausible(*merged_tail(tokens, probs_W / probs_W.sum()))


def merged_tail(tokens: Tensor, probs_W: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that are expected less than five times, counted as one."""
    is_rare_W = (probs_W > 0) & (probs_W * len(tokens) < 5)
    if not is_rare_W.any():
        return tokens, probs_W
    place = int(is_rare_W.nonzero()[0])
    merged_W = probs_W.masked_fill(is_rare_W, 0)
    merged_W[place] = probs_W[is_rare_W].sum()
    return torch.where(is_rare_W[tokens], place, tokens), merged_W


EVERYTHING: list[dict[str, Any]] = [
    {"min_p": 0.1},
    {"repetition_penalty": 1.3, "top_k": 20},
    {"frequency_penalty": 0.8, "presence_penalty": 0.5, "top_p": 0.9},
    {"logit_bias": {5: 4.0, 77: -3.0}, "temperature": 0.6},
    {"allowed_token_ids": list(range(20, 90)), "min_p": 0.02},
    {"min_tokens": 9, "stop_token_ids": list(range(40)), "repetition_penalty": 1.1},
    {"temperature": 0, "frequency_penalty": 1.0},
    {},
]


def everything() -> list[SamplingParams]:
    return [
        SamplingParams(seed=i, max_tokens=12 + i, n=1 + i % 2, ignore_eos=True, **EVERYTHING[i % len(EVERYTHING)])
        for i in range(16)
    ]


def tokens_of(outputs: list[Any]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_a_seed_gives_the_same_sample_in_any_batch_with_every_setting(path: str, llm: LLM) -> None:
    """All at once, one by one, backwards, with blocks so few that requests are preempted, and with shared prefixes."""
    prompts, params = as_inputs(make_prompts(16, 15, seed=5)), everything()
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, how)[0] for prompt, how in zip(prompts, params, strict=True)]
    backwards = llm.generate(prompts[::-1], params[::-1])[::-1]
    tight = LLM(path, **SIZES, max_num_batched_tokens=16, num_gpu_blocks_override=24, enable_prefix_caching=True)
    squeezed = tight.generate(prompts, params)
    assert tight.core.scheduler.num_preemptions > 0
    assert tokens_of(together) == tokens_of(alone) == tokens_of(backwards) == tokens_of(squeezed)
    for output, how in zip(together, params, strict=True):
        for completion in output.outputs:
            assert how.allowed_token_ids is None or set(completion.token_ids) <= set(how.allowed_token_ids)
            early = completion.token_ids[: how.min_tokens]
            assert len(early) == how.min_tokens and not set(early) & set(how.stop_token_ids)


@pytest.mark.parametrize("layout", [{}, {"max_num_batched_tokens": 7}, {"num_gpu_blocks_override": 24}], ids=str)
def test_prompt_log_probs_are_the_raw_models(path: str, layout: dict[str, Any], logits_of: Any) -> None:
    """Whole prompts, chunks, preempted requests; with prefix caching, which must not hide prompt tokens."""
    llm = LLM(path, **(SIZES | {"enable_prefix_caching": True} | layout))
    prompts = make_prompts(6, 20, seed=9)
    prompts[3] = prompts[2] = prompts[1]
    wanted = [2, 0, 3, None, 1, 2]
    params = [
        SamplingParams(n=2, seed=i, max_tokens=24, temperature=0.5, prompt_logprobs=k, ignore_eos=True)
        for i, k in enumerate(wanted)
    ]
    for output, count in zip(llm.generate(as_inputs(prompts), params), wanted, strict=True):
        if count is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        prompt, expected_TW = output.prompt_token_ids, logits_of(output.prompt_token_ids).log_softmax(-1)
        assert len(output.prompt_logprobs) == len(prompt)
        for token, entry, expected_W in zip(prompt[1:], output.prompt_logprobs[1:], expected_TW, strict=False):
            assert entry is not None and entry[token].logprob == pytest.approx(float(expected_W[token]), abs=1e-4)
            assert entry[token].rank == int((expected_W > expected_W[token]).sum()) + 1
            best = sorted(entry.values(), key=lambda e: -e.logprob)[:count]
            assert [e.logprob for e in best] == pytest.approx(expected_W.topk(count).values.tolist(), abs=1e-4)
    if "num_gpu_blocks_override" in layout:
        assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("mode", ["scaled_logprobs", "raw_logprobs", "processed_logprobs"])
def test_logprobs_mode_says_of_which_distribution(path: str, mode: str, logits_of: Any) -> None:
    llm = LLM(path, **SIZES, logprobs_mode=mode)
    prompt = make_prompts(1, 10, seed=1)[0]
    params = SamplingParams(temperature=0.6, max_tokens=16, seed=7, top_k=9, logprobs=12, ignore_eos=True)
    completion = llm.generate(as_inputs([prompt]), params)[0].outputs[0]
    tokens = completion.token_ids
    model_TW = logits_of(prompt + tokens)[len(prompt) - 1 : -1]
    best_TK = (model_TW / 0.6).topk(9, dim=-1)
    limited_TW = torch.full_like(model_TW, float("-inf")).scatter(1, best_TK.indices, best_TK.values)
    modes = {"scaled_logprobs": model_TW / 0.6, "raw_logprobs": model_TW, "processed_logprobs": limited_TW}
    expected_TW = modes[mode].log_softmax(-1)
    expected = expected_TW[torch.arange(len(tokens)), tokens]
    assert completion.sampled_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert completion.logprobs is not None
    for entry, expected_W in zip(completion.logprobs, expected_TW, strict=True):
        for token, value in entry.items():
            assert value.logprob == pytest.approx(float(expected_W[token]), abs=1e-4)
        assert (
            len(entry) == (9 if mode == "processed_logprobs" else 12) or max(e.rank or 0 for e in entry.values()) > 12
        )


def test_an_unknown_logprobs_mode_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="logprobs_mode='raw_logits' is unknown, expected one of scaled_logprobs"):
        LLM(path, **SIZES, logprobs_mode="raw_logits")


def test_bad_settings_name_every_problem() -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(
            min_p=1.5,
            presence_penalty=3,
            repetition_penalty=0,
            logit_bias={4: 101.0},
            allowed_token_ids=[],
            prompt_logprobs=-1,
            bad_words=[" "],
            stop=[7],  # type: ignore[list-item]
            temperature=float("nan"),
        )
    names = [
        "bad_words",
        "stop",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "prompt_logprobs",
    ]
    assert all(name in str(error.value) for name in [*names, "temperature"])
    assert "frequency_penalty" not in str(error.value)
