"""--enable-auto-tool-choice: what a model calls comes apart from its text, whole and streamed, for OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vllm.parrot import write_parrot
from vllm import LLM
from vllm.entrypoints.openai.api_server import serve_in_background
from vllm.entrypoints.openai.cli_args import ServerArgs
from vllm.tool_parsers import TOOL_PARSERS

MARKS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
# form -> what is written, by the last character of the prompt
TEXTS: dict[str, dict[str, list[str]]] = {
    "hermes": {
        "1": ["Let me see. ", "<tool", '_call>\n{"name": "add", ', '"arguments": {"a": [1]}}\n', "</tool_call>", "\n"],
        "2": ['<tool_call>{"name": "one", "arguments": {}}</tool_', 'call> <tool_call>{"name": "two", ', '"arguments"'
              ': {"x": "<y>"}}</tool_call>'],
        "3": ["a <tool_call> ", "that is no JSON", "</tool_call>!"],
        "4": ["x <", " 3 and ", "<tool_c"],
        "6": ['<tool_call>{"name": "add", "argum'],
    },
    "deepseek_v3": {
        "1": ["Look:", *MARKS[:2], "function", MARKS[2], 'add\n```json\n{"a": 1}\n```', *MARKS[3:]],
        "2": ["no call", "<｜end▁of▁thought｜>", " at all"],
    },
    "llama3_json": {
        "1": ['\n{"name": "add", ', '"parameters": {"a": 2}}; ', '{"name": "sub", "parameters": {}}'],
        "2": ["The set {", "1, 2}"],
        "3": ["{1, ", "2} is a set"],
    },
}  # fmt: skip
CALLED: dict[tuple[str, str], tuple[str | None, list[tuple[str, dict[str, Any]]]]] = {
    ("hermes", "1"): ("Let me see. ", [("add", {"a": [1]})]),
    ("hermes", "2"): (None, [("one", {}), ("two", {"x": "<y>"})]),
    ("deepseek_v3", "1"): ("Look:", [("add", {"a": 1})]),
    ("llama3_json", "1"): (None, [("add", {"a": 2}), ("sub", {})]),
}
WRITTEN = {
    ("hermes", "3"): "a <tool_call> that is no JSON</tool_call>!",
    ("hermes", "4"): "x < 3 and <tool_c",
    ("hermes", "6"): '<tool_call>{"name": "add", "argum',
    ("deepseek_v3", "2"): "no call at all",
    ("llama3_json", "2"): "The set {1, 2}",
    ("llama3_json", "3"): "{1, 2} is a set",
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, openai.OpenAI]]:
    """form -> the client of a server."""
    found, servers = {}, []
    for form, texts in TEXTS.items():
        model = write_parrot(tmp_path_factory.mktemp(form), texts, (*MARKS, "<｜end▁of▁thought｜>"))
        args = ServerArgs(
            port=0,
            served_model_name=["r1"],
            enable_auto_tool_choice=True,
            tool_call_parser=form,
            trust_request_chat_template=True,
        )
        servers.append(serve_in_background(LLM(model, num_gpu_blocks_override=100), args))
        url = servers[-1].__enter__().url
        found[form] = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)
    yield found
    for server in servers:
        server.__exit__(None, None, None)


def ask(client: openai.OpenAI, prompt: str, **extra: Any) -> Any:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "tools": [TOOL]} | extra
    return client.chat.completions.create(model="r1", temperature=0, max_tokens=40, **given)


def calls_of(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    assert len({call.id for call in calls}) == len(calls) and all(call.type == "function" for call in calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def added_up(stream: Any) -> tuple[str, list[Any], list[str | None]]:
    text, calls, reasons = "", list[Any](), list[str | None]()
    for chunk in stream:
        for choice in chunk.choices:
            assert not (calls and choice.delta.content), "text after the calls"
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reasons.append(choice.finish_reason)
    assert [call.index for call in calls] == list(range(len(calls)))
    return text, calls, reasons


@pytest.mark.parametrize(("form", "key"), CALLED)
def test_calls_come_apart(clients: dict[str, openai.OpenAI], form: str, key: str) -> None:
    content, calls = CALLED[form, key]
    [choice] = ask(clients[form], key).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == content
    assert calls_of(choice.message.tool_calls) == calls
    text, streamed, reasons = added_up(ask(clients[form], key, stream=True))
    assert (text, calls_of(streamed)) == (content or "", calls)
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) <= {None}


@pytest.mark.parametrize(("form", "key"), WRITTEN)
def test_what_is_no_whole_call_stays_text(clients: dict[str, openai.OpenAI], form: str, key: str) -> None:
    [choice] = ask(clients[form], key).choices
    assert (choice.message.content, choice.message.tool_calls) == (WRITTEN[form, key], None)
    assert choice.finish_reason == "stop"
    assert added_up(ask(clients[form], key, stream=True))[:2] == (WRITTEN[form, key], [])


def test_a_chat_without_tools_calls_nothing(clients: dict[str, openai.OpenAI]) -> None:
    client = clients["hermes"]
    text = "".join(TEXTS["hermes"]["1"])
    for fields in ({"tools": []}, {"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        [choice] = ask(client, "1", **fields).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    [choice] = ask(client, "2", parallel_tool_calls=False).choices
    assert calls_of(choice.message.tool_calls) == CALLED["hermes", "2"][1][:1]
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        with pytest.raises(openai.BadRequestError, match="tool_choice: this server cannot act on it"):
            ask(client, "1", tool_choice=choice)


def test_templates_get_tools_and_calls_in_the_form_that_they_take(clients: dict[str, openai.OpenAI]) -> None:
    """Most write arguments as JSON; DeepSeek-V3's adds them to a text."""
    client = clients["hermes"]
    first = ask(client, "1").choices[0].message
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "4"}
    messages = [{"role": "user", "content": "1"}, first.model_dump(), answer]
    last = "{% if m.tool_calls %}{{ %s }}{% endif %}{% endfor %}{{ tools[0].function.name }} 4"
    shown = {}
    for how in ("m.tool_calls[0].function.arguments | tojson", "'' + m.tool_calls[0].function.arguments"):
        template = "{% for m in messages %}" + last.replace("%s", how)
        body = {"messages": messages, "tools": [TOOL], "chat_template": template, "return_token_strs": True}
        url = str(client.base_url).removesuffix("/v1/") + "/tokenize"
        answered = client.post(url, body=body, cast_to=object, options={"headers": {}})
        shown[how] = "".join(answered["token_strs"]).replace("Ġ", " ")  # type: ignore[index]
    assert set(shown.values()) == {'{"a": [1]}add 4'}


PARTS = ("<tool_call>", "</tool_call>", "<tool", "_call>", "a", '{"name": "b"}', "\n")
PIECES = st.lists(st.sampled_from(PARTS), max_size=8)


@given(PIECES, st.lists(st.integers(0, 60), max_size=10))
def test_the_cuts_of_a_text_change_nothing(pieces: Sequence[str], cuts: list[int]) -> None:
    """What is shown while it comes is what stands before the first marker, and never a part of one."""
    text = "".join(pieces)
    parser = TOOL_PARSERS["hermes"](None)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, held = "", ""
    for begin, end in pairwise(places):
        held += text[begin:end]
        count = parser.num_shown(held, bool(shown))
        shown, held = shown + held[:count], held[count:]
    before = text.partition("<tool_call>")[0]
    assert before.startswith(shown) and len(before) - len(shown) < len("<tool_call>") and shown + held == text


def test_a_thought_comes_before_the_calls(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
    text = ["<think>hm", " <tool_call>?", "</think>", "so: ", call]
    args = ServerArgs(
        port=0,
        served_model_name=["r1"],
        reasoning_parser="deepseek_r1",
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
    )
    llm = LLM(write_parrot(tmp_path, {"1": text}), num_gpu_blocks_override=100)
    with serve_in_background(llm, args) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        message = ask(client, "1").choices[0].message
        assert (message.reasoning, message.content) == ("hm <tool_call>?", "so: ")
        assert calls_of(message.tool_calls) == [("add", {"a": 3})]
        assert added_up(ask(client, "1", stream=True))[0] == "so: "


def test_a_server_without_a_parser_says_how_to_start_one(tmp_path: Path) -> None:
    llm = LLM(write_parrot(tmp_path, {"1": ["one"]}), num_gpu_blocks_override=100)
    args = ServerArgs(port=0, served_model_name=["r1"])
    with serve_in_background(llm, args) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser NAME"):
            ask(client, "1")
        assert ask(client, "1", tool_choice="none").choices[0].message.content == "one"
