"""SmolLM2-135M-Instruct, a published model, in the engine beside transformers: greedy tokens and log-probs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.published import smollm2
from vllm import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
QUESTIONS = (
    "What is the capital of France?",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell?",
    "Write a haiku about the sea.",
    "Übersetze ins Deutsche: the cat sleeps.",
    "def fib(n):",
    "Name three prime numbers above 10.",
    "用中文说你好。",
    "Why is the sky blue? 🙂",
)
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def model_path() -> Path:
    return smollm2()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens_and_logprobs_equal_transformers(model_path: Path, dtype: torch.dtype) -> None:
    """In float32 every token; in bfloat16 as many, and log-probs as close to those in float32, as transformers' own."""
    llm = LLM(str(model_path), dtype=str(dtype).removeprefix("torch."), max_model_len=256, max_num_seqs=8)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(conversations, greedy, use_tqdm=False)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    in_float32, in_dtype = (their_logprobs(model_path, kind) for kind in (torch.float32, dtype))
    found: list[Tensor] = []  # per token: our log-prob and theirs less the right one; whether it and theirs are greedy
    for conversation, output in zip(conversations, outputs, strict=True):
        prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert output.prompt_token_ids == prompt
        [completion] = output.outputs
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        right, theirs = (compute(prompt, completion.token_ids) for compute in (in_float32, in_dtype))
        chosen = torch.tensor(completion.token_ids)[:, None]
        assert completion.top_logprobs is not None
        ours = torch.tensor(
            [entry[token].logprob for token, entry in zip(chosen[:, 0].tolist(), completion.top_logprobs, strict=True)]
        )
        expected = right.gather(1, chosen)[:, 0]
        differences = ours - expected, theirs.gather(1, chosen)[:, 0] - expected
        greedy_ones = right.argmax(-1) == chosen[:, 0], right.argmax(-1) == theirs.argmax(-1)
        columns = [*(one.abs() for one in differences), *(one.float() for one in greedy_ones)]
        found.append(torch.stack(columns, dim=1))
    gaps, same = torch.cat(found).split(2, dim=1)
    (ours_rms, theirs_rms), (worst, _) = gaps.square().mean(0).sqrt().tolist(), gaps.amax(0).tolist()
    ours_same, theirs_same = same.sum(0).int().tolist()
    print(
        f"{dtype}: {ours_same} (transformers: {theirs_same}) of {len(gaps)} greedy tokens; log-probs within"
        f" {worst:.1e}, {ours_rms:.1e} (transformers: {theirs_rms:.1e}) in the mean"
    )
    if dtype is torch.float32:
        assert ours_same == len(gaps) and worst < 1e-4
    else:
        assert ours_same >= theirs_same - 4 and ours_rms < 1.25 * theirs_rms and worst < 0.3


def their_logprobs(model_path: Path, dtype: torch.dtype) -> Callable[[list[int], list[int]], Tensor]:
    """transformers' log-probs [tokens of the answer, vocabulary] after a prompt."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="eager")

    def compute(prompt: list[int], answer: list[int]) -> Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1)

    return compute


def test_answers_end_and_stop_at_strings(model_path: Path) -> None:
    """At the model's end token, and at a string of the user's wherever its tokens end."""
    llm = LLM(str(model_path), dtype="float32", max_model_len=256)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False)
    [whole] = output.outputs
    assert whole.finish_reason == "stop" and whole.token_ids[-1] == llm.get_tokenizer().eos_token_id
    assert "Paris" in whole.text and "<|im_end|>" not in whole.text
    stop = whole.text[5:9]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=128, stop=[stop]), use_tqdm=False)
    assert output.outputs[0].text == whole.text[: whole.text.index(stop)]
    assert output.outputs[0].stop_reason == stop
