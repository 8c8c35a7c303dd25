"""The rollout engine with tokenizers of the real kinds: prompts in, text out, where an answer ends."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.real_tokenizers import CLOSE, KINDS, NAMES, NAMES_AND_ENDS, NAMES_AND_TAGS, OPEN, PUBLISHED, TAGS
from tests.vllm.parrot import write_successors
from tests.vllm.tiny import write_checkpoint
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

QUESTION = "x = 2?"
ANSWER = "<think>halfé</think>🙂 is 中 answer."  # no token twice, with any tokenizer that has tokens for the tags
WITHOUT_TAGS = "halfé🙂 is 中 answer."
TEXTS = (
    ANSWER,
    "Hello , world . She did n't see , did she ?",
    "two  spaces,\n\n    four   and a tab\tor é, ß, 中文中, 🙂🙂 .",
    "x <think>a b</think> c",
    "中",
)


@pytest.mark.parametrize(("kind", "tags"), NAMES_AND_TAGS)
def test_growing_text_is_the_text_of_all_tokens(kind: str, tags: str, tmp_path: Path) -> None:
    whole_tokens, are_special = TAGS[tags]
    KINDS[kind].write(tmp_path, whole_tokens, are_special=are_special)
    tokenizer = get_tokenizer(str(tmp_path))
    for skips in (True, False):
        for text in TEXTS:
            ids = tokenizer.encode(text + KINDS[kind].ends[0], add_special_tokens=False)
            detokenizer = IncrementalDetokenizer(partial(tokenizer.decode, skip_special_tokens=skips))
            pieces = [detokenizer.append([token]) for token in ids]
            assert not any("\ufffd" in piece for piece in pieces)
            at_once = tokenizer.decode(ids, skip_special_tokens=skips)
            assert "".join([*pieces, detokenizer.append([], is_finished=True)]) == at_once
            if not skips:
                assert at_once == text + KINDS[kind].ends[0], "no space is lost or added"


@pytest.mark.parametrize("kind", NAMES)
def test_growing_text_of_any_tokens(kind: str, tmp_path: Path) -> None:
    """Also of no text: only bytes in a row that are no characters have another text where a token is a byte."""
    num_tokens = KINDS[kind].write(tmp_path, (OPEN, CLOSE))
    tokenizer, rng = get_tokenizer(str(tmp_path)), random.Random(0)
    names = tokenizer.convert_ids_to_tokens(range(num_tokens))
    drawn = [token for token in range(num_tokens) if not names[token].startswith("<0x")]
    for skips in (True, False):
        for _ in range(40):
            ids = rng.choices(drawn, k=30)
            detokenizer = IncrementalDetokenizer(partial(tokenizer.decode, skip_special_tokens=skips))
            pieces = [detokenizer.append([token], is_finished=place == 30) for place, token in enumerate(ids, start=1)]
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skips)


@pytest.mark.parametrize("kind", NAMES)
def test_a_character_that_is_cut_off_spoils_no_other(kind: str, tmp_path: Path) -> None:
    KINDS[kind].write(tmp_path)
    tokenizer = get_tokenizer(str(tmp_path))
    whole = tokenizer.encode("ab日", add_special_tokens=False)
    *most, _ = tokenizer.encode("ab日𒀀", add_special_tokens=False)[: len(whole) + 2]
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    assert "".join([detokenizer.append([token]) for token in most]) == "ab日"
    assert detokenizer.append([], is_finished=True) == "\ufffd"


@pytest.mark.parametrize("kind", NAMES)
def test_a_stop_string_is_met_wherever_tokens_end(kind: str, tmp_path: Path) -> None:
    KINDS[kind].write(tmp_path, (OPEN, CLOSE))
    tokenizer = get_tokenizer(str(tmp_path))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(len(text)):
            stop = text[start : start + 3]
            detokenizer = IncrementalDetokenizer(tokenizer.decode, stop=(stop,))
            shown = "".join([detokenizer.append([token]) for token in ids])
            assert (shown, detokenizer.stop_reason) == (text[: text.index(stop)], stop)


def chat_llm(path: Path, kind: str, end: str) -> tuple[LLM, str, list[int]]:
    """An engine that answers every question with one answer and the token ``end``; the answer and its tokens."""
    vocab_size = KINDS[kind].write(path, (OPEN, CLOSE))
    checkpoint = write_checkpoint(path, vocab_size=vocab_size, eos_token_id=None)
    tokenizer = get_tokenizer(checkpoint)
    prompt = tokenizer.encode(KINDS[kind].turn.format(QUESTION), add_special_tokens=False)
    turn = KINDS[kind].turn.format(QUESTION)
    answer = ANSWER if len(tokenizer.encode(OPEN, add_special_tokens=False)) == 1 else WITHOUT_TAGS
    ids = tokenizer.encode(turn + answer + end, add_special_tokens=False)[len(prompt) :]
    assert len({prompt[-1], *ids}) == len(ids) + 1, "a token has one successor"
    write_successors(path, dict(pairwise([prompt[-1], *ids])))
    return LLM(checkpoint, max_model_len=96, max_num_seqs=4, block_size=4), answer, ids


@pytest.mark.parametrize(("kind", "end"), NAMES_AND_ENDS)
def test_a_question_reaches_the_engine_and_its_answer_ends(kind: str, end: str, tmp_path: Path) -> None:
    """Through the chat template; at each token that generation_config.json names."""
    llm, answer, ids = chat_llm(tmp_path, kind, end)
    tokenizer, greedy = llm.get_tokenizer(), SamplingParams(temperature=0, max_tokens=60)
    messages = [{"role": "user", "content": QUESTION}]
    [output] = llm.chat(messages, greedy, use_tqdm=False)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert output.prompt_token_ids == expected
    assert tokenizer.decode(expected) == KINDS[kind].turn.format(QUESTION)
    if KINDS[kind].bos is not None:
        assert expected.count(tokenizer.bos_token_id) == 1 and expected[0] == tokenizer.bos_token_id
    [completion] = output.outputs
    assert (completion.token_ids, completion.text, completion.finish_reason) == (ids, answer, "stop")
    # Text that is no conversation: the tokenizer puts its begin token before it, where it is made to.
    [plain] = llm.generate(QUESTION, SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain.prompt_token_ids == AutoTokenizer.from_pretrained(tmp_path)(QUESTION).input_ids
    if kind not in PUBLISHED:  # of these Llama 3.1's alone is
        assert plain.prompt_token_ids.count(tokenizer.bos_token_id) == (KINDS[kind].bos is not None)

    for params in (SamplingParams(temperature=0, max_tokens=60, stop=["🙂 i", "never"]), greedy):
        whole = answer.partition("🙂 i")[0] if params.stop else answer
        assert shown(llm, expected, params) == (
            whole,
            llm.generate(of(expected), params, use_tqdm=False)[0].outputs[0].text,
        )


def of(prompt: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt}


def shown(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[str, str]:
    """The text that a stream shows, as pieces and as a whole that grows."""
    texts: dict[str, list[str]] = {"pieces": [], "grows": []}
    for name, kind in (("pieces", RequestOutputKind.DELTA), ("grows", RequestOutputKind.CUMULATIVE)):
        streamed = SamplingParams(temperature=0, max_tokens=60, stop=params.stop, output_kind=kind)
        llm.engine.add_request(name, of(prompt), streamed)
    while llm.engine.has_unfinished_requests():
        outputs: list[RequestOutput] = llm.engine.step()
        for output in outputs:
            texts[output.request_id].append(output.outputs[0].text)
    return "".join(texts["pieces"]), texts["grows"][-1]
