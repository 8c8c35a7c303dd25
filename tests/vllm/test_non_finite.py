"""NaN and infinity in logits and weights are errors that name the request, the rank and the weight; never a token."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.compiler import needs_compiler
from tests.vllm.serving import write_served_checkpoint
from tests.vllm.test_sampling import sampling_batch
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from verl.exact_mode.rollout_ops import sample as exact_sample
from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.api_server import ApiServer, serve_in_background
from vllm.entrypoints.openai.cli_args import ServerArgs
from vllm.ops.contract import NOT_FINITE, LogitEdits, SampledTokens, SamplingBatch
from vllm.ops.cpu import rollout_ops
from vllm.ops.reference_sample import sample
from vllm.v1.engine.non_finite import NonFiniteLogitsError
from vllm_ascend.ops.sample import sample as ascend_sample

Sample = Callable[[Tensor, SamplingBatch], SampledTokens]


def rows_with_bad_logits(size: int) -> tuple[Tensor, list[bool]]:
    """Logits [9, size], the whole ones in between, and which rows are whole."""
    bad = [None, math.nan, None, math.inf, -math.inf, None, math.nan, math.inf, -math.inf]
    logits = torch.randn(len(bad), size, generator=torch.Generator().manual_seed(0)) * 3
    for row, value in enumerate(bad):
        if value is not None:
            logits[row, (0, size // 2, size - 1)[row % 3]] = value
    return logits, [value is None for value in bad]


def check_marks(sample: Sample, size: int, temperature: float, **settings: Any) -> None:
    """Rows with a bad logit get the mark and no others; these have the tokens of a batch without bad rows."""
    logits, is_whole = rows_with_bad_logits(size)
    kinds = {"has_greedy": temperature == 0, "has_random": temperature > 0}

    def batch(rows: np.ndarray) -> SamplingBatch:
        own = {name: value[rows] if isinstance(value, Tensor) else value for name, value in settings.items()}
        kind = {"temperature_B": torch.full((len(rows),), temperature)} | kinds
        return sampling_batch(rows.astype(np.uint64), rows, size, **kind | own)

    whole = np.flatnonzero(is_whole)
    found, alone = sample(logits, batch(np.arange(len(logits)))), sample(logits[whole], batch(whole))
    assert (found.token_ids_B != NOT_FINITE).tolist() == is_whole
    assert found.logprobs_B.isfinite().tolist() == is_whole
    assert torch.equal(found.token_ids_B[whole], alone.token_ids_B)
    assert torch.equal(found.logprobs_B[whole], alone.logprobs_B)


def cpu_sample(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    return rollout_ops().sample(logits, batch)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("table", [sample, exact_sample, ascend_sample, pytest.param(cpu_sample, marks=needs_compiler)])
def test_rows_are_marked_by_every_table(table: Sample, temperature: float) -> None:
    for size in (5, 50):
        check_marks(table, size, temperature)


def test_edits_that_make_logits_infinite_leave_the_row_without_a_log_prob() -> None:
    """The model's logits are whole: the row is the request's own fault, and its neighbours are not touched."""
    logits = torch.randn(2, 20)
    edits = LogitEdits(bias_at_M=torch.tensor([3]), bias_M=torch.tensor([math.inf]))
    for mode in ("scaled_logprobs", "raw_logprobs", "processed_logprobs"):
        keys = np.arange(2).astype(np.uint64), np.arange(2)
        found = sample(logits, sampling_batch(*keys, 20, edits=edits, logprobs_mode=mode))
        alone = sample(logits[1:], sampling_batch(keys[0][1:], keys[1][1:], 20, logprobs_mode=mode))
        assert found.logprobs_B.isnan().tolist() == [True, False]
        assert found.token_ids_B.min() >= 0 and torch.equal(found.token_ids_B[1:], alone.token_ids_B)


def test_what_is_allowed_is_drawn_however_unlikely_it_is() -> None:
    logits = torch.zeros(50, 20)
    logits[:, 0], logits[:, 7], logits[:, 9] = 300.0, -20.0, -30.0
    banned = torch.ones(50, 20, dtype=torch.bool)
    banned[:, 7] = banned[:, 9] = False
    keys = np.arange(50).astype(np.uint64), np.arange(50)
    assert sample(logits, sampling_batch(*keys, 20, banned_BW=banned)).token_ids_B.tolist() == [7] * 50


SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BAD_TOKEN = 13


def tokens(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]


def break_weights(llm: LLM) -> None:
    """Whoever reads BAD_TOKEN gets NaN from the first layer on."""
    llm.core.worker.model.embed_tokens.weight.data[BAD_TOKEN] = math.nan


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"enforce_eager": False}, marks=needs_compiler),
        {"rollout_ops": "vllm.ops.reference:rollout_ops"},
    ],
)
def test_generate_raises_and_the_engine_is_clean_afterwards(given: dict[str, Any], tmp_path: Path) -> None:
    llm = LLM(write_checkpoint(tmp_path), skip_tokenizer_init=True, **SIZES, **given)
    whole = [5, 9, 11, 4, 8, 3]
    expected = tokens(llm, whole)
    break_weights(llm)
    message = (
        r"logits of request \d+_0 at token 6 are NaN or infinite on rank 0: weight model\.embed_tokens\.weight of .*"
    )
    for params in (GREEDY, SamplingParams(max_tokens=1, prompt_logprobs=0), SamplingParams(top_k=3, min_tokens=1)):
        with pytest.raises(NonFiniteLogitsError, match=message + r" is nan at \(13, 0\)"):
            tokens(llm, [5, BAD_TOKEN, 11, 4, 8, 3], whole, params=params)
        assert not llm.engine.has_unfinished_requests()
        assert tokens(llm, whole) == expected  # also in the blocks that held NaN


def test_settings_that_were_dangerous(tmp_path: Path) -> None:
    llm = LLM(write_checkpoint(tmp_path), skip_tokenizer_init=True, **SIZES)
    expected = tokens(llm, [5, 9, 11])
    for temperature in (1e-6, 1e-30, 1e-40):
        params = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, seed=3)
        assert tokens(llm, [5, 9, 11], params=params) == expected
    for bad in ({"logit_bias": {3: math.inf}}, {"logit_bias": {3: math.nan}}, {"repetition_penalty": 1e-38}):
        with pytest.raises(ValueError, match="logit_bias|repetition_penalty"):
            SamplingParams(**bad)  # type: ignore[arg-type]


def test_weights_that_are_not_finite_are_not_loaded(tmp_path: Path) -> None:
    path, name = write_checkpoint(tmp_path / "a"), "model.layers.1.mlp.experts.3.down_proj.weight"
    llm = LLM(path, skip_tokenizer_init=True, **SIZES)
    for file in Path(path).glob("*.safetensors"):
        stored = load_file(file)
        if name in stored:
            stored[name][2, 5] = -math.inf
            save_file(stored, file)
            bad_file = file.name
    with pytest.raises(ValueError, match=rf"weight {name} of .*{bad_file} is -inf at \(2, 5\)"):
        LLM(path, skip_tokenizer_init=True, **SIZES)

    new = random_weights(TINY, seed=1)
    new[name][0, 0] = math.nan
    for load in (llm.update_weights, llm.load_weights):
        with pytest.raises(ValueError, match=f"the update has NaN or infinity in 1 tensors: {name}"):
            load(new.items())
        with pytest.raises(RuntimeError, match="never loaded"):
            tokens(llm, [5])
    llm.update_weights(random_weights(TINY, seed=1).items())
    assert len(tokens(llm, [5])[0]) == 8


def post(server: ApiServer, **body: Any) -> tuple[int, str]:
    body = {"prompt": [5, 9, 11], "max_tokens": 6, "temperature": 0, "ignore_eos": True} | body
    given = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return get(given)


def get(what: str | urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(what, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_server_fails_the_request_and_its_health_until_the_weights_are_whole(tmp_path: Path) -> None:
    llm = LLM(write_served_checkpoint(tmp_path), **SIZES)
    with serve_in_background(llm, ServerArgs(port=0)) as server:
        _, text = post(server)
        expected = json.loads(text)["choices"][0]["text"]
        with server.paused():
            break_weights(llm)
        assert get(server.url + "/health")[0] == 200
        bad = [5, BAD_TOKEN, 11]
        status, text = post(server, prompt=bad)
        error = json.loads(text)["error"]
        assert (status, error["code"]) == (500, "non_finite_logits")
        assert "rank 0: weight model.embed_tokens.weight" in error["message"] and "request cmpl-" in error["message"]
        status, text = post(server, prompt=[[5, 9, 11], bad], n=2)
        assert status == 500
        status, text = post(server, prompt=bad, stream=True)
        assert "non_finite_logits" in text and "[DONE]" not in text
        status, text = post(server, prompt=bad, max_tokens=1, echo=True, logprobs=1)
        assert status == 500
        status, text = get(server.url + "/health")
        assert status == 503 and "model.embed_tokens.weight" in text
        # Others go on.
        status, text = post(server)
        assert (status, json.loads(text)["choices"][0]["text"]) == (200, expected)
        assert post(server, logit_bias={"3": 1e38})[0] == 400 and post(server, temperature=1e-38)[0] == 200
        with server.paused():
            llm.update_weights(random_weights(TINY | {"vocab_size": 258}).items())
        assert get(server.url + "/health")[0] == 200
        status, text = post(server)
        assert (status, json.loads(text)["choices"][0]["text"]) == (200, expected)
