"""Conversations as token ids, and the calls in them, by published tokenizers and their chat templates."""

from __future__ import annotations

from typing import Any

import pytest

from hf_formats.tokenizer import load_tokenizer
from tests.published import tokenizer_folder
from verl.experimental.agent_loop.conversation import Conversation
from vllm.tool_parsers import TOOL_PARSERS

# tokenizer -> (the form of its calls, a turn that calls the calculator)
CALLS = {
    "qwen3": ("hermes", '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'),
    "deepseek_v3": (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n"
        '{"expression": "6 * 7"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "llama3_1": ("llama3_json", '{"name": "calculator", "parameters": {"expression": "6 * 7"}}'),
}
FIRST = [{"role": "user", "content": "What is 6 * 7?"}]
RESULT = [{"role": "tool", "name": "calculator", "content": "42"}]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", CALLS)
def test_three_turns_of_canonical_tokens_are_the_template_of_the_whole_conversation(name: str) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder(name)))
    end = tokenizer.eos_token
    conversation = Conversation(tokenizer, [], {}, {tokenizer.eos_token_id})
    row = conversation.begin(FIRST)
    messages = list(FIRST)
    last = "<think>\n\n</think>\n\n42" if name == "qwen3" else "42"  # Qwen3 writes a thought into its last turn
    turns = (CALLS[name][1], "One more.", last)
    for turn, follows in zip(turns, (RESULT, [{"role": "user", "content": "Sure?"}], None), strict=True):
        sampled = _ids(tokenizer, turn + end)
        row += sampled
        conversation.answer(sampled)
        messages.append({"role": "assistant", "content": turn})
        if follows is not None:
            given = conversation.follow(follows)
            assert given.num_kept is None
            row += given.token_ids
            messages += follows
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert row == _ids(tokenizer, whole)[: len(row)]
    assert tokenizer.decode(_ids(tokenizer, whole)[len(row) :]).strip() == ""


@pytest.mark.parametrize("name", CALLS)
def test_other_tokens_of_a_turn_equal_the_template_in_text(name: str) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder(name)))
    conversation = Conversation(tokenizer, [], {}, {tokenizer.eos_token_id})
    row = conversation.begin(FIRST)
    sampled = [token for letter in "forty-two" for token in _ids(tokenizer, letter)]  # as no tokenizer would
    conversation.answer(sampled)
    given = conversation.follow([{"role": "user", "content": "Sure?"}])
    assert given.num_kept is None
    assert given.token_ids[0] == tokenizer.eos_token_id  # the turn was cut: its end is the template's
    messages = [*FIRST, {"role": "assistant", "content": "forty-two"}, {"role": "user", "content": "Sure?"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode([*row, *sampled, *given.token_ids]) == whole
    assert [*row, *sampled, *given.token_ids] != _ids(tokenizer, whole)


def test_a_template_that_strips_thoughts_begins_a_new_row() -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder("qwen3")))
    conversation = Conversation(tokenizer, [], {}, {tokenizer.eos_token_id})
    row, messages = conversation.begin(FIRST), list(FIRST)
    turns = ("<think>\nsix sevens\n</think>\n\n42", "<think>\nyes\n</think>\n\nSure.", "<think>\nno\n</think>\n\nNo.")
    for number, turn in enumerate(turns):
        sampled = [token for letter in turn for token in _ids(tokenizer, letter)] if number else _ids(tokenizer, turn)
        conversation.answer([*sampled, tokenizer.eos_token_id])
        given = conversation.follow([{"role": "user", "content": f"Sure, {number}?"}])
        assert given.num_kept is not None
        before = tokenizer.decode(row[: given.num_kept])
        row = [*row, *sampled, tokenizer.eos_token_id][: given.num_kept] + given.token_ids
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": f"Sure, {number}?"}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert row == _ids(tokenizer, whole) and "six sevens" not in whole
        assert before.endswith("<|im_start|>") and before.count("<|im_start|>") == 2 * number + 2


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_found_in_the_forms_of_published_models(name: str) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder(name)))
    form, text = CALLS[name]
    parser = TOOL_PARSERS[form](tokenizer)
    lead = "" if form == "llama3_json" else "I compute."
    content, [call] = parser.extract_tool_calls(_ids(tokenizer, lead + text + tokenizer.eos_token))
    assert (content, call.name) == (lead, "calculator")
    assert call.arguments.replace(" ", "") == '{"expression":"6*7"}'
    assert parser.extract_tool_calls(_ids(tokenizer, "42" + tokenizer.eos_token)) == ("42", [])


@pytest.mark.parametrize("text", ["<tool_call>\nnot json\n</tool_call>", "<tool_call>\n[1]\n</tool_call>"])
def test_a_call_that_is_no_json_has_no_name_and_keeps_its_text(text: str) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder("qwen3")))
    _, [call] = TOOL_PARSERS["hermes"](tokenizer).extract_tool_calls(_ids(tokenizer, text))
    assert call.name == "" and call.arguments in text
