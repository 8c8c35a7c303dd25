"""Fields of requests that nothing here reads change no answer and are in the log, or are refused by name."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import ValidationError

from tests.vllm.serving import write_served_checkpoint
from vllm import LLM
from vllm.entrypoints.openai.api_server import ApiServer, serve_in_background
from vllm.entrypoints.openai.cli_args import ServerArgs
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.openai.request_fields import FIELDS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 3, "temperature": 0},
    TEXT: {"prompt": "hi", "max_tokens": 3, "temperature": 0},
    "/tokenize": {"messages": HI},
    "/detokenize": {"tokens": [2, 3]},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    # The template shows every field of a message and whatever tools it would get.
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | default('') }}"
    model = write_served_checkpoint(tmp_path_factory.mktemp("fields") / "model", template)
    with serve_in_background(LLM(model, num_gpu_blocks_override=400), ServerArgs(port=0)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ApiServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def ask(server: ApiServer, client: openai.OpenAI) -> Any:
    def ask(route: str, **fields: Any) -> Any:
        """The part of the answer to the route's body with `fields` that does not differ from call to call."""
        got: Any = client.post(server.url + route, body=BODIES[route] | fields, cast_to=object)
        return got if "choices" not in got else (got["choices"], got["usage"]["prompt_tokens"])

    return ask


def test_every_parameter_of_the_client_is_read_or_in_the_table(client: openai.OpenAI) -> None:
    of_http = {"extra_headers", "extra_query", "extra_body", "timeout"}
    for create, body in (
        (client.chat.completions.create, ChatCompletionRequest),
        (client.completions.create, CompletionRequest),
    ):
        known = {name.rpartition(".")[2] for name in (*body.model_fields, *FIELDS)}
        assert set(inspect.signature(create).parameters) - of_http <= known


def one_field(name: str, value: Any) -> ChatCompletionRequest:
    first, _, last = name.rpartition(".")
    field = {first: {last: value}} if first else {name: value}
    return ChatCompletionRequest.model_validate({"messages": HI, "stream": True} | field)


def test_the_table_says_what_each_field_does(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    for name, field in FIELDS.items():
        for value in ("anything", {"a": [1]}) if field.accepted is None else field.accepted:
            assert one_field(name, value).without_effect() == [name]
        assert one_field(name, None).without_effect() == []
        if field.accepted is not None:
            with pytest.raises(ValidationError) as refusal:
                one_field(name, {"a": 1})
            [problem] = refusal.value.errors()
            assert problem["loc"] == tuple(name.split("."))
            assert problem["msg"] == f"this server cannot act on it: {field.reason}"
    taken = {name: (field.accepted or ("anything",))[0] for name, field in FIELDS.items() if field.accepted != ()}
    taken = {name: value for name, value in taken.items() if "." not in name}
    with caplog.at_level(logging.INFO):
        assert ask(CHAT, **taken) == ask(CHAT)
    for name in taken:
        assert f"{name} in a request is taken without effect: {FIELDS[name].reason}" in caplog.text
    assert "without effect: user, metadata, " in caplog.text


def test_a_field_is_explained_once_and_named_in_the_line_of_its_requests(
    ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            ask(TEXT, max_token=7, **{"strange\x1b[31m\nname": 1})
        ask(TEXT, **{f"field{number}": number for number in range(20)})
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("request_log")]
    reasons = [line for line in lines if "is taken without effect" in line]
    assert reasons[:2] == [
        "max_token in a request is taken without effect: this server does not know it; did you mean 'max_tokens'?",
        "strange [31m name in a request is taken without effect: this server does not know it",
    ]
    assert sum("without effect: max_token, strange [31m name" in line for line in lines) == 2
    assert len(reasons) == 2 + 8, "a client cannot fill the log"
    assert any("field6, field7 and 12 more:" in line for line in lines)


@pytest.mark.parametrize("route", BODIES)
def test_null_stands_for_the_default_of_every_field(ask: Any, route: str) -> None:
    bodies: dict[str, Any] = {
        CHAT: ChatCompletionRequest,
        TEXT: CompletionRequest,
        "/tokenize": TokenizeChatRequest,
        "/detokenize": DetokenizeRequest,
    }
    nulls = {name: None for name in (*bodies[route].model_fields, *FIELDS, "unknown") if name not in BODIES[route]}
    assert ask(route, **nulls) == ask(route)
    text = TokenizeCompletionRequest.model_validate({"prompt": "x", "return_token_strs": None})
    assert text.return_token_strs is False


def test_tools_are_taken_where_they_change_nothing(client: openai.OpenAI, ask: Any) -> None:
    plain = ask(CHAT)
    fields: dict[str, Any]
    for fields in (
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"functions": [TOOL["function"]], "function_call": "none"},
        {"response_format": {"type": "text", "json_schema": None}, "modalities": ["text"], "n": 1, "logprobs": False},
        {"top_logprobs": 0, "user": 5, "metadata": {"k": "v"}, "reasoning_effort": "low", "suffix": ""},
    ):
        assert ask(CHAT, **fields) == plain, fields
    assert ask(TEXT, logprobs=False, n=2, best_of=2) == ask(TEXT, n=2), "no log-probs are asked for"
    for name, fields in (
        ("tools", {"tools": [TOOL]}),
        ("tools", {"tools": [TOOL], "tool_choice": "auto"}),
        ("tool_choice", {"tools": [], "tool_choice": "required"}),
        ("tool_choice", {"tools": [], "tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("response_format", {"response_format": SCHEMA}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("guided_choice", {"guided_choice": ["yes", "no"]}),
        ("logits_processors", {"logits_processors": ["m.f"]}),
    ):
        with pytest.raises(openai.BadRequestError, match=f"{name}: this server cannot act on it") as error:
            ask(CHAT, **fields)
        assert error.value.param == name
    with pytest.raises(openai.BadRequestError, match="suffix: this server cannot act on it"):
        client.completions.create(model="x", prompt="x", suffix="y")


def test_a_dumped_answer_is_a_message_again(client: openai.OpenAI, server: ApiServer, ask: Any) -> None:
    model = server.engine.llm.config.model.model
    first = client.chat.completions.create(model=model, messages=HI, max_tokens=2, tools=[], user="me", store=False)
    dumped = first.choices[0].message.model_dump() | {"refusal": None, "tool_calls": [], "audio": None}
    plain = {"role": "assistant", "content": first.choices[0].message.content}
    assert ask("/tokenize", messages=[*HI, dumped]) == ask("/tokenize", messages=[*HI, plain])
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "annotations": None}
    assert ask("/tokenize", messages=[{"role": "user", "content": [part], "name": None}]) == ask("/tokenize")
    named = ask("/tokenize", messages=[{"role": "user", "content": "hi", "name": "Ann"}], return_token_strs=True)
    assert '"name"' in "".join(named["token_strs"]), "the template gets what a message has"
    with pytest.raises(openai.BadRequestError, match="messages.*Input should be 'text'"):
        ask(CHAT, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_the_page_names_fields_that_are_taken_and_fields_that_are_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    free, strict = page.partition("\n## Fields\n")[2].partition("\n## ")[0].split("\n- ")[1:]
    for part, is_free in ((free, True), (strict, False)):
        named = re.findall(r"`(\w+)`", part)
        assert named and all((FIELDS[name].accepted is None) is is_free for name in named)
    assert GenerationRequest.model_fields.keys().isdisjoint(FIELDS)
