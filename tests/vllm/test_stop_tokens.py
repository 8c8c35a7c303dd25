"""Generation ends at every end token of config.json and of generation_config.json, and verl's rollout masks it so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from safetensors.torch import load_file

from hf_formats.config import load_hf_config
from hf_formats.end_tokens import tokenizer_end_token
from mindspeed_llm.hf_checkpoint import save_hf_checkpoint
from mindspeed_llm.plain_config import write_plain_config
from tests.vllm.serving import write_served_checkpoint
from tests.vllm.tiny import write_checkpoint
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.entrypoints.openai.api_server import serve_in_background
from vllm.entrypoints.openai.cli_args import ServerArgs

PROMPT = TokensPrompt(prompt_token_ids=[5, 9, 11])
SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "skip_tokenizer_init": True}


def ends(llm: LLM, **given: Any) -> tuple[list[int], str | None]:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, **given), use_tqdm=False)
    return list(output.outputs[0].token_ids), output.outputs[0].finish_reason


def test_both_files_name_end_tokens(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, eos_token_id=None)
    free, reason = ends(LLM(path, **SIZES))
    assert (len(free), reason) == (24, "length")
    end = free[3]
    first = free.index(end) + 1
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, free[-1]]}))
    llm = LLM(path, **SIZES)
    assert ends(llm) == (free[:first], "stop")
    assert ends(llm, ignore_eos=True) == (free, "length")

    rollout: Any = SimpleNamespace(config=RolloutConfig(prompt_length=4, response_length=24), inference_engine=llm)
    meta = {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False}
    request = vLLMRollout.request(rollout, "0", PROMPT["prompt_token_ids"], 1, 0, meta)
    llm.engine.run_requests([request])
    batch = vLLMRollout.to_batch(rollout, [request], meta)
    assert batch.batch["response_mask"].sum() == first and batch.batch["responses"][0, first - 1] == end
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop"]


@pytest.mark.parametrize(
    ("inner", "beside", "expected"), [(2, [2, 0], (2, 0)), ([7, 8], 9, (7, 8, 9)), (1, None, (1,))]
)
def test_end_tokens_of_both_files(tmp_path: Path, inner: Any, beside: Any, expected: tuple[int, ...]) -> None:
    write_checkpoint(tmp_path, eos_token_id=inner)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": beside}))
    assert load_hf_config(tmp_path).eos_token_ids == expected
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is '</s>'; expected a token's id"):
        load_hf_config(tmp_path)


def named_by_tokenizer(path: Path, token: int) -> str:
    """Let the tokenizer's files name this token of its vocabulary as the end; returns its text."""
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    text = next(text for text, index in vocabulary.items() if index == token)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": text}))
    return text


def test_the_end_token_of_the_tokenizer_alone(tmp_path: Path) -> None:
    path, sizes = write_served_checkpoint(tmp_path), SIZES | {"skip_tokenizer_init": False}
    edit_json(tmp_path / "config.json", eos_token_id=None)
    free, reason = ends(LLM(path, **SIZES))
    assert reason == "length"
    end = free[3]
    named_by_tokenizer(tmp_path, end)
    first = free.index(end) + 1
    assert tokenizer_end_token(tmp_path) == end
    llm = LLM(path, **sizes)
    assert ends(llm) == (free[:first], "stop")
    assert ends(llm, detokenize=False) == (free[:first], "stop")
    assert ends(llm, ignore_eos=True) == (free, "length")
    assert end not in ends(llm, min_tokens=first + 2)[0][: first + 2]
    other = next(token for token in free[: first - 1] if token != end)
    assert ends(llm, stop_token_ids=[other])[0] == free[: free.index(other) + 1]
    with (
        serve_in_background(llm, ServerArgs(port=0)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(model=path, prompt=[5, 9, 11], temperature=0, max_tokens=24)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", first)

    # Both files name another: each of them ends a sample.
    edit_json(tmp_path / "config.json", eos_token_id=free[-1])
    assert ends(LLM(path, **sizes)) == (free[: min(first, free.index(free[-1]) + 1)], "stop")


def test_where_tokenizers_name_their_end(tmp_path: Path) -> None:
    """As a text or an object, by the list of added tokens of either file, or in the vocabulary of either form."""
    config, tokenizer = tmp_path / "tokenizer_config.json", tmp_path / "tokenizer.json"
    assert tokenizer_end_token(tmp_path) is None
    config.write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": {}}))
    assert tokenizer_end_token(tmp_path) is None
    tokenizer.write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<|im_end|>"}]}))
    assert tokenizer_end_token(tmp_path) == 7
    for vocabulary in ({"a": 0, "<|im_end|>": 1}, [["a", -1.0], ["<|im_end|>", -2.0]]):
        tokenizer.write_text(json.dumps({"added_tokens": [], "model": {"vocab": vocabulary}}))
        assert tokenizer_end_token(tmp_path) == 1
    edit_json(config, added_tokens_decoder={"5": {"content": "x"}, "9": {"content": "<|im_end|>"}})
    assert tokenizer_end_token(tmp_path) == 9
    edit_json(config, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert tokenizer_end_token(tmp_path) == 9


def test_exports_name_the_end_token_of_the_tokenizer(tmp_path: Path) -> None:
    source, written = tmp_path / "source", {}
    write_served_checkpoint(source)
    weights = [pair for file in sorted(source.glob("*.safetensors")) for pair in load_file(file).items()]
    for name, given in (
        ("known", {"eos_token_id": 1}),
        ("other", {"eos_token_id": 0}),
        ("none", {"eos_token_id": None}),
    ):
        edit_json(source / "config.json", **given)
        save_hf_checkpoint(iter(weights), tmp_path / name, source)
        write_plain_config(source, tmp_path / f"plain {name}")
        files = [tmp_path / place / "generation_config.json" for place in (name, f"plain {name}")]
        written[name] = [json.loads(file.read_text()) if file.is_file() else None for file in files]
    assert written == {
        "known": [None, None],
        "other": [{"eos_token_id": [1, 0]}] * 2,
        "none": [{"eos_token_id": [1]}] * 2,
    }
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "top_k": 3}))
    save_hf_checkpoint(iter(weights), tmp_path / "again", source)
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert again == {"eos_token_id": [1, 5], "top_k": 3}


def edit_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
