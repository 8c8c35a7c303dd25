"""Tool calls in messages, as published chat templates write them."""

from __future__ import annotations

from typing import Any

import pytest

from hf_formats.chat import chat_text
from hf_formats.tokenizer import load_tokenizer
from tests.published import tokenizer_folder

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
TOLD: dict[str, Any] = {"role": "tool", "tool_call_id": "1", "content": "3"}
WRITTEN = {
    "qwen3": "<|im_start|>assistant\n<tool_call>\n"
    '{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call><|im_end|>',
    "deepseek_v3": "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": [2]}\n```<｜tool▁call▁end｜>',
}


def _chat(call: dict[str, Any], content: Any = None) -> list[dict[str, Any]]:
    calling = {"role": "assistant", "content": content, "tool_calls": [call]}
    return [{"role": "user", "content": "1 + 2?"}, calling, TOLD]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("content", [None, "", "left out"])
def test_calls_are_written_whatever_form_the_template_takes(name: str, is_text: bool, content: str | None) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder(name)))
    arguments: Any = CALL["function"]["arguments"] if is_text else {"a": 1, "b": [2]}  # type: ignore[index]
    chat = _chat(CALL | {"function": {"name": "add", "arguments": arguments}}, content)
    if content == "left out":
        del chat[1]["content"]
    text = chat_text(tokenizer, chat)
    assert WRITTEN[name] in text and text.index(WRITTEN[name]) < text.index("3", text.index(WRITTEN[name]))


def test_a_template_that_leaves_calls_out_is_named() -> None:
    with pytest.raises(ValueError, match="leaves out the messages' tool calls"):
        chat_text(load_tokenizer(str(tokenizer_folder("llama3_1"))), _chat(CALL))
    with pytest.raises(ValueError, match="leaves out the messages' tool calls"):  # it writes a call or a text
        chat_text(load_tokenizer(str(tokenizer_folder("deepseek_v3"))), _chat(CALL, "Let me see."))
    text = chat_text(load_tokenizer(str(tokenizer_folder("qwen3"))), _chat(CALL, "Let me see."))
    assert "Let me see.\n<tool_call>" in text
