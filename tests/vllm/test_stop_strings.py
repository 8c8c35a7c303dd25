"""Text while it grows, and stop strings that end it."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import pytest

from tests.compiler import needs_compiler
from tests.vllm.text_model import byte_tokens, write_text_checkpoint
from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_text_checkpoint(tmp_path_factory.mktemp("text"))
    return LLM(path, max_model_len=96, max_num_seqs=4, max_num_batched_tokens=40, block_size=4)


def letters_only(**settings: object) -> SamplingParams:
    """Samples of letters, each a token."""
    return SamplingParams(max_tokens=40, seed=3, allowed_token_ids=byte_tokens(LETTERS), **settings)  # type: ignore[arg-type]


def sample(llm: LLM, params: SamplingParams) -> CompletionOutput:
    return llm.generate("the bare", params)[0].outputs[0]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_make_the_whole_text_and_no_character_is_cut(llm: LLM, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(["a", "th", " t", "é", "中", "🙂", "\n", "ab", " ", "ß"]) for _ in range(60))
    tokenizer = llm.get_tokenizer()
    for tokens in (byte_tokens(text), tokenizer.encode(text)):
        detokenizer = IncrementalDetokenizer(tokenizer.decode)
        pieces = [detokenizer.append([token]) for token in tokens]
        assert "\ufffd" not in "".join(pieces)
        assert "".join([*pieces, detokenizer.append([], is_finished=True)]) == text


def test_bytes_that_make_no_character_come_out_with_the_rest(llm: LLM) -> None:
    decode = llm.get_tokenizer().decode
    tokens = [*byte_tokens("a中b"), *byte_tokens("中")[:2]]
    detokenizer = IncrementalDetokenizer(decode)
    assert detokenizer.append(tokens) == "a中b"
    assert detokenizer.append([], is_finished=True) == "\ufffd"
    garbage = [byte_tokens("中")[1]] * 200
    detokenizer = IncrementalDetokenizer(decode)
    shown = "".join(detokenizer.append([token]) for token in garbage)
    assert len(shown) > 190 and shown + detokenizer.append([], is_finished=True) == decode(garbage)


def test_a_copy_goes_on_without_its_tokenizer(llm: LLM) -> None:
    decode = llm.get_tokenizer().decode
    detokenizer = IncrementalDetokenizer(decode, stop=("cab",))
    detokenizer.append(byte_tokens("abc"))
    for clone in (copy.deepcopy(detokenizer), pickle.loads(pickle.dumps(detokenizer))):
        clone.attach(decode)
        clone.catch_up(byte_tokens("abcabb"))
        assert clone.stop_reason == "cab" and clone.text == "ab"


def test_a_stop_string_over_several_tokens_ends_the_sample_and_its_text(llm: LLM) -> None:
    free = sample(llm, letters_only())
    assert len(free.text) == 40 == len(free.token_ids) and set(free.text) <= set(LETTERS)
    stop = free.text[20:23]
    start = free.text.index(stop)
    cut = sample(llm, letters_only(stop=["zzz", stop]))
    assert (cut.finish_reason, cut.stop_reason, cut.text) == ("stop", stop, free.text[:start])
    assert cut.token_ids == free.token_ids[: start + 3]
    assert sample(llm, letters_only(stop=stop, include_stop_str_in_output=True)).text == free.text[: start + 3]
    # The string that begins first wins, whatever the order.
    assert sample(llm, letters_only(stop=[stop[1:], stop])).stop_reason == stop
    later = sample(llm, letters_only(stop=stop, min_tokens=start + 3))
    again = free.text.find(stop, start + 1)
    assert later.text == (free.text if again < 0 else free.text[:again])


def test_streams_never_show_what_a_stop_string_takes_back(llm: LLM) -> None:
    free = sample(llm, letters_only())
    stop = free.text[15:19]
    kinds = {"delta": RequestOutputKind.DELTA, "cumulative": RequestOutputKind.CUMULATIVE}
    for name, kind in kinds.items():
        llm.engine.add_request(name, {"prompt": "the bare"}, letters_only(stop=stop, output_kind=kind))
    texts: dict[str, list[str]] = {name: [] for name in kinds}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            texts[output.request_id].append(output.outputs[0].text)
    expected = free.text[: free.text.index(stop)]
    assert "".join(texts["delta"]) == expected == texts["cumulative"][-1]
    assert all(expected.startswith(text) for text in texts["cumulative"])


@needs_compiler  # log-probs of the plain-torch table change in the last bit with the tokens of a step
def test_a_cut_generation_goes_on_with_its_stop_strings_and_penalties(llm: LLM) -> None:
    free = sample(llm, letters_only(frequency_penalty=0.5))
    params = letters_only(frequency_penalty=0.5, stop=free.text[11:14], prompt_logprobs=1)
    whole = llm.generate("the bare", params)[0]
    assert 1 < len(whole.outputs[0].token_ids) <= 14
    output = llm.generate("the bare", params, max_steps=1)[0]
    while not output.finished:
        assert output.outputs[0].finish_reason == "abort"
        output = llm.generate(pickle.loads(pickle.dumps(output)), params, max_steps=3)[0]
    assert output.outputs[0] == whole.outputs[0] and output.outputs[0].stop_reason == free.text[11:14]
    assert output.prompt_logprobs == whole.prompt_logprobs


def test_bad_words_never_come_and_biased_ones_do(llm: LLM) -> None:
    free = sample(llm, letters_only())
    word = free.text[10:12]
    without = sample(llm, letters_only(bad_words=[word, "a"]))
    assert word not in without.text and "a" not in without.text and len(without.text) == 40
    assert without.text[: free.text.index(word)] == free.text[: free.text.index(word)] or "a" in free.text
    wanted = byte_tokens("h")[0]
    assert sample(llm, letters_only(logit_bias={wanted: 100.0})).text == "h" * 40
    assert "h" not in sample(llm, letters_only(logit_bias={wanted: -100.0})).text


def test_log_probs_name_their_tokens(llm: LLM) -> None:
    output = llm.generate("ab", letters_only(logprobs=2, prompt_logprobs=1))[0]
    assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
    for token, letter, entry in zip(
        output.outputs[0].token_ids, output.outputs[0].text, output.outputs[0].logprobs, strict=True
    ):
        assert entry[token].decoded_token == letter


def test_text_that_cannot_be_used_is_refused(tmp_path: Path, llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"stop holds an empty string; stop strings need detokenize=True"):
        SamplingParams(stop=["a", ""], detokenize=False)
    tokenless = LLM(llm.config.model.model, skip_tokenizer_init=True, max_model_len=32)
    params = SamplingParams(stop="x", bad_words=["y"])
    with pytest.raises(ValueError, match=r"prompt 0: stop holds text(.|\n)*bad_words holds text, but the"):
        tokenless.generate({"prompt_token_ids": [5]}, params)
    params = SamplingParams(allowed_token_ids=[7, 999], logit_bias={-3: 1.0})
    with pytest.raises(ValueError, match=r"logit_bias holds -3(.|\n)*allowed_token_ids holds 999, outside of"):
        llm.generate("ab", params)
    with pytest.raises(ValueError, match="may leave no token to draw"):
        llm.generate("ab", SamplingParams(allowed_token_ids=[1, *byte_tokens("a")], bad_words=["a"], min_tokens=1))
