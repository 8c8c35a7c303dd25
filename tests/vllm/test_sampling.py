"""Sampling: the right distribution, from the seed alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.vllm.test_parity import as_inputs, make_prompts
from tests.vllm.tiny import TINY, write_checkpoint
from vllm import LLM, SamplingParams
from vllm.ops.contract import LogitEdits, SampledTokens, SamplingBatch
from vllm.ops.reference_sample import sample
from vllm.v1.sample.rng import derive_seed, exponential_noise, position_keys, splitmix64, vocab_keys

DRAWS = 40_000


def sampling_batch(seeds: np.ndarray, positions: np.ndarray, vocab_size: int, **settings: Any) -> SamplingBatch:
    """Rows with these noise keys; all random at temperature 1 and without limits but for `settings`."""
    plain = {
        "temperature_B": torch.ones(len(seeds)),
        "keys_B2": torch.from_numpy(position_keys(splitmix64(seeds), positions)),
        "vocab_keys_W": torch.from_numpy(vocab_keys(vocab_size)),
        "top_k_B": None,
        "top_p_B": None,
        "banned_BW": None,
        "has_greedy": False,
        "has_random": True,
    }
    return SamplingBatch(**plain | settings)


def draw(logits_W: Tensor, temperature: float = 1.0, seed: int = 0, **limits: Any) -> SampledTokens:
    """DRAWS samples: half over seeds, half over positions of one seed; `limits` are of every row."""
    half = DRAWS // 2
    seeds = np.concatenate((np.arange(half), np.full(half, 12345 + seed))).astype(np.uint64)
    positions = np.concatenate((np.zeros(half, dtype=np.int64), np.arange(half)))
    settings = {
        f"{name}_B": torch.full((DRAWS,), limits.pop(name)) for name in ("top_k", "top_p", "min_p") if name in limits
    }
    settings |= limits | {"temperature_B": torch.full((DRAWS,), temperature)}
    return sample(logits_W.expand(DRAWS, -1), sampling_batch(seeds, positions, len(logits_W), **settings))


def chi_square_is_plausible(tokens: Tensor, probs: Tensor) -> bool:
    """Pearson's statistic within five standard deviations of its mean; cells of probability 0 must be empty."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert int(counts[probs == 0].sum()) == 0
    expected = probs.double()[probs > 0] * len(tokens)
    statistic = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    return abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.fixture(scope="module")
def logits_W() -> Tensor:
    return torch.randn(30, generator=torch.Generator().manual_seed(0)) * 1.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(logits_W: Tensor, temperature: float) -> None:
    probs = (logits_W / temperature).softmax(-1)
    result = draw(logits_W, temperature)
    assert chi_square_is_plausible(result.token_ids_B, probs)
    torch.testing.assert_close(result.logprobs_B, probs.log()[result.token_ids_B], atol=1e-5, rtol=0)


def test_top_k_and_top_p_cut_and_renormalise(logits_W: Tensor) -> None:
    probs = logits_W.softmax(-1)
    ranked = probs.sort(descending=True)
    top_k = torch.zeros_like(probs).index_copy(0, ranked.indices[:5], ranked.values[:5])
    assert chi_square_is_plausible(draw(logits_W, top_k=5).token_ids_B, top_k / top_k.sum())
    kept = int((ranked.values.cumsum(0) < 0.7).sum()) + 1
    top_p = torch.zeros_like(probs).index_copy(0, ranked.indices[:kept], ranked.values[:kept])
    result = draw(logits_W, top_p=0.7)
    assert chi_square_is_plausible(result.token_ids_B, top_p / top_p.sum())
    torch.testing.assert_close(result.logprobs_B, probs.log()[result.token_ids_B], atol=1e-5, rtol=0)
    assert set(draw(logits_W, top_k=5, top_p=1e-6).token_ids_B.tolist()) == {int(probs.argmax())}


def test_min_p_leaves_out_what_is_far_less_likely_than_the_best(logits_W: Tensor) -> None:
    probs = (logits_W / 1.3).softmax(-1)
    limited = torch.where(probs < 0.04 * probs.max(), 0.0, probs)
    assert 2 < int((limited > 0).sum()) < 25
    result = draw(logits_W, 1.3, min_p=0.04)
    assert chi_square_is_plausible(result.token_ids_B, limited / limited.sum())
    torch.testing.assert_close(result.logprobs_B, probs.log()[result.token_ids_B], atol=1e-5, rtol=0)
    # Of 30 tokens min-p keeps some, of these top-p the better part.
    both = set(draw(logits_W, 1.3, min_p=0.04, top_p=0.6).token_ids_B.tolist())
    ranked = (limited / limited.sum()).sort(descending=True)
    assert both == set(ranked.indices[: int((ranked.values.cumsum(0) < 0.6).sum()) + 1].tolist())


def edits_of_all_rows(vocab_size: int, bias: dict[int, float], seen: dict[int, tuple[float, float]]) -> LogitEdits:
    """The same biases and seen tokens {token: (repetition penalty, subtracted penalty)} in DRAWS rows."""

    def places(tokens: dict[int, Any]) -> Tensor:
        return (torch.arange(DRAWS)[:, None] * vocab_size + torch.tensor(list(tokens))).flatten()

    values = torch.tensor(list(seen.values())).repeat(DRAWS, 1)
    return LogitEdits(
        places(bias), torch.tensor(list(bias.values())).repeat(DRAWS), places(seen), values[:, 0], values[:, 1]
    )


def test_bias_penalties_and_bans_change_the_distribution(logits_W: Tensor) -> None:
    best, worst = int(logits_W.argmax()), int(logits_W.argmin())
    assert logits_W[best] > 1 and logits_W[worst] < -1
    edited = logits_W.clone()
    edited[3] += 2.5
    edited[worst] += 4.0
    edited[best] = edited[best] / 1.4 - 0.6
    edited[worst] = torch.where(edited[worst] > 0, edited[worst] / 1.4, edited[worst] * 1.4)
    edited[0] = -math.inf
    banned = torch.zeros(DRAWS, len(logits_W), dtype=torch.bool)
    banned[:, 0] = True
    edits = edits_of_all_rows(len(logits_W), {3: 2.5, worst: 4.0}, {best: (1.4, 0.6), worst: (1.4, 0.0)})
    probs, model = (edited / 0.8).softmax(-1), (logits_W / 0.8).log_softmax(-1)
    result = draw(logits_W, 0.8, edits=edits, banned_BW=banned)
    assert chi_square_is_plausible(result.token_ids_B, probs)
    torch.testing.assert_close(result.logprobs_B, model[result.token_ids_B], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}], ids=str
)
def test_log_probs_of_the_raw_model_and_of_the_sampling_distribution(logits_W: Tensor, limits: dict[str, Any]) -> None:
    """The reported probabilities of what can be drawn sum to 1, and are the frequencies."""
    edits = edits_of_all_rows(len(logits_W), {4: 1.5}, {7: (1.2, 0.5)})
    raw = draw(logits_W, 0.7, edits=edits, logprobs_mode="raw_logprobs", **limits)
    torch.testing.assert_close(raw.logprobs_B, logits_W.log_softmax(-1)[raw.token_ids_B], atol=1e-5, rtol=0)
    result = draw(logits_W, 0.7, edits=edits, logprobs_mode="processed_logprobs", num_top_logprobs=30, **limits)
    assert torch.equal(result.token_ids_B, raw.token_ids_B)
    assert result.top_ids_BK is not None and result.top_logprobs_BK is not None
    probs = torch.zeros_like(logits_W).index_copy(0, result.top_ids_BK[0], result.top_logprobs_BK[0].exp())
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5) and int((probs > 0).sum()) < 30 + (not limits)
    assert chi_square_is_plausible(result.token_ids_B, probs)
    torch.testing.assert_close(result.logprobs_B, probs.log()[result.token_ids_B], atol=1e-4, rtol=0)


def test_ties_at_the_edge_of_top_k_and_top_p() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert set(draw(logits, top_k=2).token_ids_B.tolist()) == {0, 1, 2, 3}  # as likely as the second
    # 0.42, then 0.155 each: two of the three reach 0.7, the last ones of the vocabulary.
    assert set(draw(logits, top_p=0.7).token_ids_B.tolist()) == {0, 2, 3}


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """A tail of 30,000 tokens that weigh 1e-2 together, where coarse noise would show."""
    tail = 30_000
    probs = torch.cat((torch.tensor([0.99]), torch.full((tail,), 0.01 / tail)))
    keys = torch.from_numpy(position_keys(splitmix64(np.arange(2000, dtype=np.uint64)), np.zeros(2000, dtype=np.int64)))
    table = torch.from_numpy(vocab_keys(tail + 1))
    hits = sum(int((probs / exponential_noise(part, table)).argmax(-1).gt(0).sum()) for part in keys.split(100))
    assert 4 <= hits <= 40  # Poisson of mean 20


def test_noise_is_exponential_and_uncorrelated() -> None:
    keys = torch.from_numpy(position_keys(splitmix64(np.arange(500, dtype=np.uint64)), np.arange(500)))
    noise = exponential_noise(keys, torch.from_numpy(vocab_keys(512))).double()
    assert float(noise.min()) > 0 and abs(float(noise.mean()) - 1) < 0.01 and abs(float(noise.var()) - 1) < 0.03
    assert float(torch.corrcoef(noise).fill_diagonal_(0).abs().max()) < 0.25
    assert float(torch.corrcoef(noise.T).fill_diagonal_(0).abs().max()) < 0.25


def test_noise_has_the_bits_that_integer_shifts_give() -> None:
    """The formula of rng.py with numpy's shifts, which `exponential_noise` goes without."""
    keys = position_keys(splitmix64(np.arange(64, dtype=np.uint64)), np.arange(64))
    table = vocab_keys(4096)
    x = (keys[:, :1] ^ table) * np.int32(747796405)
    x ^= (x.view(np.uint32) >> np.uint32(15)).view(np.int32)
    x = (x + keys[:, 1:]) * np.int32(277803737)
    x ^= x >> 15
    u = torch.from_numpy(x).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    noise = exponential_noise(torch.from_numpy(keys), torch.from_numpy(table))
    assert torch.equal(noise, u.neg().log1p().neg())


def test_derived_seeds_differ() -> None:
    seeds = {derive_seed(base, i, j) for base in range(10) for i in range(10) for j in range(10)}
    assert len(seeds) == 1000


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    return LLM(path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=6, max_num_batched_tokens=40)


def test_a_seeded_request_does_not_depend_on_its_batch(llm: LLM) -> None:
    prompts = as_inputs(make_prompts(10, 15, seed=3))
    params = [
        SamplingParams(max_tokens=20, seed=i, top_k=40 if i % 2 else 0, top_p=0.95, ignore_eos=True) for i in range(10)
    ]
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, p)[0].outputs[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    backwards = [o.outputs[0].token_ids for o in llm.generate(prompts[::-1], params[::-1])][::-1]
    assert together == alone == backwards


def test_n_samples_differ_and_the_first_is_the_seeds_own(llm: LLM) -> None:
    prompt = as_inputs(make_prompts(1, 10))[0]
    many = llm.generate(prompt, SamplingParams(n=5, max_tokens=16, seed=4, ignore_eos=True))[0].outputs
    one = llm.generate(prompt, SamplingParams(max_tokens=16, seed=4, ignore_eos=True))[0].outputs
    assert [o.index for o in many] == list(range(5))
    assert many[0].token_ids == one[0].token_ids
    assert len({tuple(o.token_ids) for o in many}) == 5


def test_unseeded_requests_differ_and_repeat_with_the_engines_seed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    prompts, params = as_inputs([[5, 6, 7]] * 4), SamplingParams(max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        llm = LLM(path, skip_tokenizer_init=True, max_model_len=32, max_num_seqs=4, seed=seed)
        runs.append([tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, params)])
    assert runs[0] == runs[1] and len(set(runs[0])) == 4 and not set(runs[0]) & set(runs[2])


def test_stop_tokens_min_tokens_and_eos(llm: LLM) -> None:
    prompt = as_inputs(make_prompts(1, 10))[0]
    free = llm.generate(prompt, SamplingParams(max_tokens=30, seed=9, ignore_eos=True))[0].outputs[0]
    stop = free.token_ids[7]
    cut = free.token_ids.index(stop) + 1
    stopped = llm.generate(prompt, SamplingParams(max_tokens=30, seed=9, ignore_eos=True, stop_token_ids=[stop]))[
        0
    ].outputs[0]
    assert stopped.token_ids == free.token_ids[:cut]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    late = SamplingParams(max_tokens=30, seed=9, ignore_eos=True, stop_token_ids=[stop], min_tokens=cut + 3)
    later = llm.generate(prompt, late)[0].outputs[0]
    assert len(later.token_ids) >= cut + 3 and stop not in later.token_ids[: cut + 3]
    assert free.finish_reason == "length" and free.stop_reason is None
    every_token = SamplingParams(max_tokens=30, seed=9, stop_token_ids=[t for t in range(TINY["vocab_size"]) if t != 1])
    assert len(llm.generate(prompt, every_token)[0].outputs[0].token_ids) == 1


def test_top_logprobs_hold_the_sampled_token_and_the_best(llm: LLM) -> None:
    prompt = as_inputs(make_prompts(1, 10))[0]
    output = llm.generate(prompt, SamplingParams(max_tokens=6, seed=1, logprobs=3, ignore_eos=True))[0].outputs[0]
    assert output.logprobs is not None
    for token, value, entry in zip(output.token_ids, output.sampled_logprobs, output.logprobs, strict=True):
        assert entry[token].logprob == value and 3 <= len(entry) <= 4
        best = sorted(entry.values(), key=lambda e: -e.logprob)
        assert [e.rank for e in best[:3]] == [1, 2, 3]
    assert output.cumulative_logprob == pytest.approx(sum(output.sampled_logprobs))


def test_bad_sampling_params_name_every_problem() -> None:
    with pytest.raises(ValueError, match=r"n=0 .*temperature=-1.*top_p=0") as error:
        SamplingParams(n=0, temperature=-1, top_p=0)
    assert "top_k" not in str(error.value)
    for top_k in (-2, 2**31):
        with pytest.raises(ValueError, match=f"top_k={top_k} must be"):
            SamplingParams(top_k=top_k)
