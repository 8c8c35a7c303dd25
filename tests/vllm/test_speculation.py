"""Speculation changes nothing: tokens, log-probs, reasons and experts are those of a run without it, bit for bit."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.parallel.launcher import run_ranks
from tests.vllm.tiny import TINY, write_checkpoint
from vllm import LLM, SamplingParams
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import read_speculative_config
from vllm.engine.client_args import SPECULATIVE_ARGS, take_client_args
from vllm.entrypoints.openai.cli_args import parse_args
from vllm.v1.engine.llm_engine import StepLimits
from vllm.v1.request import Request
from vllm.v1.sample.extras import SamplingExtras
from vllm.v1.spec_decode.draft_length import StepCosts
from vllm.v1.spec_decode.suffix_automaton import NativeSuffixAutomaton, SuffixAutomaton

VOCAB, MAX_LEN = 12, 96
CHANGES = {"vocab_size": VOCAB, "num_nextn_predict_layers": 1}
METHODS = ("mtp", "ngram", "suffix")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, 0, **TINY | CHANGES | {"torch_dtype": request.param})
    return str(folder)


def make_llm(path: str, drafts: dict[str, Any] | None, **changes: Any) -> LLM:
    sizes: dict[str, Any] = {"max_num_seqs": 6, "block_size": 4, "num_gpu_blocks_override": 40}
    return LLM(
        path,
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        enable_return_routed_experts=True,
        speculative_config=None if drafts is None else {"adaptive": False} | drafts,
        rollout_ops="vllm.ops.cpu:default_ops",
        **sizes | changes,
    )


def some_requests(seed: int, count: int) -> list[Request]:
    """With everything that a sampled token may depend on."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 12))] * rng.randint(1, 2)
        extras = SamplingExtras(
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            bad_words=rng.choice([(), ((3, 4), (5,))]),
            min_p=rng.choice([0.0, 0.1]),
        )
        found.append(
            Request(
                str(number),
                prompt,
                max_tokens=rng.randint(1, MAX_LEN - len(prompt)),
                seed=rng.randrange(2**64),
                temperature=rng.choice([0.0, 0.3, 1.0]),
                top_k=rng.choice([0, 3]),
                top_p=rng.choice([1.0, 0.9]),
                min_tokens=rng.randint(0, 4),
                stop_ids=frozenset({1} if rng.random() < 0.5 else ()),
                num_top_logprobs=rng.choice([0, 0, 2]),
                extras=rng.choice([None, extras]),
                priority=rng.choice([0, 0, 1]),
            )
        )
    return found


def results(requests: list[Request]) -> list[Any]:
    return [
        (
            request.output_token_ids,
            request.output_logprobs,
            request.output_top,
            request.finish_reason,
            request.policy_versions(),
            None if request.routed_experts is None else request.routed_experts.tolist(),
        )
        for request in requests
    ]


def run(llm: LLM, requests: list[Request], cuts: list[tuple[int, bool]]) -> list[Any]:
    """The requests come in parts, and all are taken out and put back in between."""
    llm.engine.core.scheduler.kv.reset_prefix_cache()
    waiting = list(requests)
    for steps, keeps_cache in cuts:
        llm.engine.add_requests(waiting[:4])
        del waiting[:4]
        llm.engine.run(StepLimits(steps))
        taken = llm.engine.withdraw(keeps_cache)
        llm.engine.add_requests(taken)
    llm.engine.add_requests(waiting)
    llm.engine.run(StepLimits())
    return results(requests)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("path", "way"),
    [
        ("float32", {}),
        ("float32", {"max_num_batched_tokens": 9}),
        ("bfloat16", {"enforce_eager": None}),
        pytest.param("float32", {"enforce_eager": None}, marks=pytest.mark.slow),
        pytest.param("bfloat16", {}, marks=pytest.mark.slow),
        pytest.param("bfloat16", {"max_num_batched_tokens": 9}, marks=pytest.mark.slow),
    ],
    ids=str,
    indirect=["path"],
)
def test_any_requests_end_as_without_drafts(path: str, method: str, way: dict[str, Any]) -> None:
    plain = make_llm(path, None, **way)
    engines = [make_llm(path, {"method": method, "num_speculative_tokens": k}, **way) for k in range(1, 8)]
    for engine in engines[::2]:  # many rows do not pay: the prediction layer stops and goes on
        engine.engine.core.scheduler.speculation.costs = StepCosts(
            *[np.maximum(9, np.arange(50))] * 2, *[np.ones(50)] * 2
        )

    @settings(
        max_examples=6,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.integers(0, 10**6),
        st.lists(st.tuples(st.integers(1, 15), st.booleans()), max_size=3),
        st.sampled_from(engines),
    )
    def check(seed: int, cuts: list[tuple[int, bool]], engine: LLM) -> None:
        expected = run(plain, some_requests(seed, 10), cuts)
        assert run(engine, some_requests(seed, 10), cuts) == expected

    check()
    counts = [
        sum(column) for column in zip(*(one.engine.core.scheduler.speculation.counts for one in engines), strict=True)
    ]
    assert counts[2] > 30 and counts[1] > counts[2]
    assert any(one.engine.core.scheduler.num_preemptions for one in engines)


def of_ranks(path: str, drafts: dict[str, Any] | None, way: dict[str, Any]) -> Any:
    import torch.distributed as dist

    llm = make_llm(path, drafts, **way)
    count = 8 if dist.get_rank() == 0 or "tensor_parallel_size" in way else 3
    seed = 5 if "tensor_parallel_size" in way else 5 + dist.get_rank()
    requests = some_requests(seed, count)
    llm.engine.run_requests(requests)
    return results(requests), llm.engine.core.num_steps


WAYS = {
    "replicas that share experts": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "replicas that move requests": {"data_parallel_size": 2, "enable_expert_parallel": True, "rebalance_interval": 3},
    "captured": {"data_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": None},
    "tp2": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way == "replicas that share experts" else way for way in WAYS]
)  # those that move requests share their experts too
@pytest.mark.parametrize("path", ["float32"], indirect=True)
def test_two_ranks_end_as_without_drafts(path: str, way: str) -> None:
    plain = run_ranks(of_ranks, 2, path, None, WAYS[way])
    for method in ("mtp", "suffix"):
        drafted = run_ranks(of_ranks, 2, path, {"method": method, "num_speculative_tokens": 3}, WAYS[way])
        for rank in range(2):
            assert drafted[rank][0] == plain[rank][0]
            assert drafted[rank][1] < plain[rank][1]


def test_answers_that_come_again_take_a_step_for_every_draft(path: str) -> None:
    drafts = {"method": "suffix", "num_speculative_tokens": 7}
    llm = make_llm(path, drafts, max_num_seqs=2, num_gpu_blocks_override=200)
    params = SamplingParams(max_tokens=64, seed=3, ignore_eos=True)
    steps = []
    for _ in range(2):
        before = llm.engine.core.num_steps
        [output] = llm.generate({"prompt_token_ids": [2, 3, 4]}, params, use_tqdm=False)
        steps.append(llm.engine.core.num_steps - before)
    assert len(output.outputs[0].token_ids) == 64 and steps[1] <= 64 // 8 + 4
    held = make_llm(path, drafts | {"disable_by_batch_size": 1}, max_num_seqs=2)
    held.generate([{"prompt_token_ids": [2, 3, 4]}] * 2, params, use_tqdm=False)
    assert held.engine.core.scheduler.speculation.counts == [0, 0, 0]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        (
            {"method": "eagle", "num_speculative_tokens": 2},
            "method='eagle' is unknown, expected one of mtp, ngram, suffix",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0 must be a whole number from 1 on"),
        ({"method": "ngram", "num_speculative_tokens": 2, "top_k": 2}, "speculative_config has no 'top_k'"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "x"}, "speculative_config.model='x': drafts come"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"},
            "rejection_sample_method='synthetic': a draft is right where",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min=5 exceeds prompt_lookup_max=4",
        ),
    ],
)
@pytest.mark.parametrize("path", ["float32"], indirect=True)
def test_what_is_wrong_is_named(path: str, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_llm(path, given)
    with pytest.raises(ValueError, match="spec_tokens=1, and speculative_config.num_speculative_tokens=2: give one"):
        make_llm(path, {"method": "ngram", "num_speculative_tokens": 2}, spec_tokens=1)


def test_what_scripts_of_vllm_say_is_acted_on_or_noted(caplog: pytest.LogCaptureFixture) -> None:
    for name, known in SPECULATIVE_ARGS.items():
        assert take_client_args({name: known.default}, SPECULATIVE_ARGS) == ({}, [], []), name
    ours: dict[str, Any] = {"num_speculative_tokens": 2}
    for words, expected in (
        ({"method": "deepseek_mtp"}, {"method": "mtp"}),
        ({"method": "ngram_gpu", "prompt_lookup_max": 1}, {"prompt_lookup_max": 1, "prompt_lookup_min": 1}),
        ({"model": "[ngram]", "prompt_lookup_min": 5}, {"prompt_lookup_max": 5, "prompt_lookup_min": 5}),
        ({"method": "ngram", "prompt_lookup_max": 3}, {"prompt_lookup_max": 3, "prompt_lookup_min": 2}),
    ):
        assert read_speculative_config(words | ours) == ([], SpeculativeConfig(**{"method": "ngram"} | expected | ours))
    with caplog.at_level(logging.INFO):
        tree = {"suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_cached_requests": 10000}
        assert read_speculative_config({"method": "suffix"} | tree | ours)[1] == SpeculativeConfig("suffix", 2)
    assert "speculative_config.suffix_decoding_max_tree_depth=8: suffix_max_tokens limits" in caplog.text
    assert "max_cached_requests" not in caplog.text, "the default is no note"


def test_the_server_takes_keys_as_options(capsys: pytest.CaptureFixture[str]) -> None:
    of_drafts, others = {"method": "ngram", "num_speculative_tokens": 3}, ["--kv-transfer-config.role.rank", "3"]
    for words in (
        ["--speculative-config.method", "ngram", "--speculative_config.num-speculative-tokens=3"],
        ["-sc", '{"method": "ngram", "num_speculative_tokens": 3}'],
        ["-sc.method=ngram", "-sc.num_speculative_tokens", "3"],
    ):
        assert parse_args(["DIR", *words])[1].speculative_config == of_drafts
    [_, engine, notes] = parse_args(["DIR", "-O3", "--spec-method", "ngram", "--spec-tokens", "3"])
    assert (engine.spec_method, engine.spec_tokens) == ("ngram", 3) and notes[0].startswith("optimization_level=3: ")
    for words, problem in (
        (["--speculative-config.method"], "--speculative-config.method needs a value"),
        (["--speculative-config.method", "--seed", "3"], "--speculative-config.method needs a value"),
        (["-sc", "{}", "--speculative-config.method", "ngram"], "--speculative-config: give the whole object or its"),
        (["--speculative-config.a", "1", "--speculative-config.a.b", "2"], "a has a value of its own already"),
        (others, 'kv_transfer_config=\'{"role": {"rank": 3}}\': prefill and decode run'),
    ):
        with pytest.raises(SystemExit):
            parse_args(["DIR", *words])
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("path", ["float32"], indirect=True)
def test_the_server_takes_it_as_json(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, engine, _ = parse_args([path, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'])
    assert engine.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    for text in ("ngram", "3"):
        with pytest.raises(SystemExit):
            parse_args([path, "--speculative-config", text])
        assert "--speculative-config" in capsys.readouterr().err


def test_the_automaton_in_cpp_equals_that_in_python() -> None:
    rng = random.Random(1)
    for _ in range(60):
        both, num_texts, kinds = (
            (SuffixAutomaton(), NativeSuffixAutomaton()),
            rng.randint(1, 5),
            rng.choice([2, 4, 900]),
        )
        ends = [0] * num_texts
        for _ in range(rng.randint(1, 60)):
            more = [[rng.randrange(kinds) for _ in range(rng.randint(0, 40))] for _ in range(num_texts)]
            found = [one.step(ends, more, 5, 2) for one in both]
            assert found[0] == found[1] and both[0].num_tokens == both[1].num_tokens
            ends = found[0][0]


def test_an_automaton_continues_the_longest_end_that_stood_before() -> None:
    rng = random.Random(0)
    for _ in range(150):
        automaton, texts = SuffixAutomaton(), [[] for _ in range(rng.randint(1, 4))]
        ends, kinds = [0] * len(texts), rng.choice([2, 3, 5])
        for _ in range(rng.randint(1, 50)):
            chosen, token = rng.randrange(len(texts)), rng.randrange(kinds)
            texts[chosen].append(token)
            ends[chosen] = automaton.append(ends[chosen], token)
            asked = rng.randrange(len(texts))
            places = longest_end(texts[asked], texts)
            found, _ = automaton.continued(ends[asked], 1, 1)
            assert bool(found) == bool(places)
            assert not found or found[0] in places


def longest_end(text: list[int], texts: list[list[int]]) -> set[int]:
    """The tokens that follow the longest end of a text that something follows, anywhere."""
    for length in range(len(text), 0, -1):
        end = text[-length:]
        found = {
            other[start + length]
            for other in texts
            for start in range(len(other) - length)
            if other[start : start + length] == end
        }
        if found:
            return found
    return set()
