"""--reasoning-parser deepseek_r1: thought and answer apart, whole and streamed, however the text is cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.vllm.parrot import write_parrot
from vllm import LLM
from vllm.entrypoints.openai.api_server import ApiServer, serve_in_background
from vllm.entrypoints.openai.cli_args import ServerArgs
from vllm.reasoning import DeepSeekR1ReasoningParser, Qwen3ReasoningParser

TEXTS = {  # by the last character of the prompt
    "1": ["<think>", "one", " and", "</think>", "\n\n", "two"],
    "2": ["<th", "ink>", "pl", "an</", "think", ">an", "swer"],
    "3": ["no tag", " at first", "</th", "ink", "> ", "then"],
    "4": ["it", " never", " ends </thin"],
    "5": ["<thi", "nk></", "thi", "nk>empty"],
    "6": ["plain", " answer"],
    "7": ["half a thought", "</think>\n", "whole"],
    "\n": ["\nR1", " thinks</", "think> on"],
}
ANSWERS: dict[str, tuple[str, str | None]] = {
    "1": ("one and", "\n\ntwo"),
    "2": ("plan", "answer"),
    "3": ("no tag at first", " then"),
    "4": ("it never ends </thin", None),
    "5": ("", "empty"),
}
ARGS = ServerArgs(port=0, served_model_name=["r1"], reasoning_parser="deepseek_r1", trust_request_chat_template=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    model = write_parrot(tmp_path_factory.mktemp("parrot"), TEXTS)
    with serve_in_background(LLM(model, num_gpu_blocks_override=400), ARGS) as server:
        yield server


@pytest.fixture
def client(server: ApiServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, prompt: str, **extra: Any) -> Any:
    messages: Any = extra.pop("messages", [{"role": "user", "content": prompt}])
    return client.chat.completions.create(model="r1", messages=messages, temperature=0, max_tokens=40, **extra)


def added_up(stream: Any) -> tuple[str, str, str | None, Any]:
    """(thought, answer, finish reason, usage) of a stream of one choice; a chunk adds to one of the two."""
    thought, answer, reason, usage, num_roles = "", "", None, None, 0
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            fields = choice.delta.model_dump(exclude_unset=True)
            num_roles += fields.pop("role", None) is not None
            assert fields.pop("reasoning_content", None) == fields.get("reasoning")
            assert len(fields) == 1, fields
            assert not (answer and "reasoning" in fields), "a thought after the answer"
            thought += fields.get("reasoning", "")
            answer += fields.get("content", "")
            reason = choice.finish_reason
    assert num_roles == 1
    return thought, answer, reason, usage


LETTERS = st.text(alphabet="<>/think ab\n")


@given(st.sampled_from(["", "<think>", "\n<think>"]), LETTERS, LETTERS, st.lists(st.integers(0, 40), max_size=12))
def test_the_cuts_of_a_text_change_nothing(start: str, thought: str, answer: str, cuts: list[int]) -> None:
    assume("<think>" not in thought and "</think>" not in thought)
    text = f"{start}{thought}</think>{answer}"
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    parser = DeepSeekR1ReasoningParser("[assistant]")
    found = [parser.extract(piece, index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    assert ["".join(parts) for parts in zip(*found, strict=True)] == [thought, answer]


@given(LETTERS, LETTERS, st.booleans(), st.lists(st.integers(0, 40), max_size=12))
def test_qwen3_may_answer_at_once(first: str, rest: str, thinks: bool, cuts: list[int]) -> None:
    assume("<think>" not in first and "</think>" not in first)
    text = f"<think>{first}</think>{rest}" if thinks else first + rest
    assume(thinks or not text.lstrip().startswith("<think>"))
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    parser = Qwen3ReasoningParser("<|im_start|>assistant\n")
    found = [parser.extract(piece, index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    expected = [first, rest] if thinks else ["", text]
    assert ["".join(parts) for parts in zip(*found, strict=True)] == expected
    assert Qwen3ReasoningParser("<think>\n").extract("a</think>b") == ("a", "b")


@pytest.mark.parametrize("key", sorted(ANSWERS))
def test_thought_and_answer_come_apart(client: openai.OpenAI, key: str) -> None:
    thought, answer = ANSWERS[key]
    whole = ask(client, key, logprobs=True)
    message = whole.choices[0].message
    assert (message.reasoning, message.reasoning_content, message.content) == (thought, thought, answer)
    assert whole.usage.completion_tokens == len(TEXTS[key]) + 1 == len(whole.choices[0].logprobs.content)
    stream = ask(client, key, stream=True, stream_options={"include_usage": True})
    assert added_up(stream) == (thought, answer or "", "stop", whole.usage)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [("{{ '<think>\n' }}", ("\nR1 thinks", " on")), ("<think>\n\n</think>", ("", "\n\ntwo"))],
    ids=["opened", "closed"],
)
def test_a_template_may_begin_the_thought_or_close_it(
    client: openai.OpenAI, ending: str, expected: tuple[str, str]
) -> None:
    body = {"chat_template": "{{ messages[0].content }}" + ending}
    message = ask(client, "x", extra_body=body).choices[0].message
    assert (message.reasoning_content, message.content) == expected
    assert added_up(ask(client, "x", stream=True, extra_body=body))[:2] == expected


def test_a_message_that_is_continued_keeps_its_thought(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>a</think> 6"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    message = ask(client, "", messages=messages, extra_body=body).choices[0].message
    assert (message.reasoning_content, message.content) == ("", "plain answer")
    messages[-1] = {"role": "assistant", "content": "<think>a 7"}
    message = ask(client, "", messages=messages, extra_body=body).choices[0].message
    assert (message.reasoning_content, message.content) == ("half a thought", "\nwhole")


def test_samples_of_a_request_have_thoughts_of_their_own(client: openai.OpenAI) -> None:
    choices = ask(client, "2", n=3).choices
    assert [(one.message.reasoning_content, one.message.content) for one in choices] == [ANSWERS["2"]] * 3


def test_completions_are_text(client: openai.OpenAI) -> None:
    text = client.completions.create(model="r1", prompt="1", temperature=0, max_tokens=40).choices[0].text
    assert text == "".join(TEXTS["1"])


def test_tags_that_are_special_tokens_and_a_server_without_a_parser(tmp_path: Path) -> None:
    model = write_parrot(tmp_path, TEXTS, ["<think>", "</think>", " never"])
    llm = LLM(model, num_gpu_blocks_override=400)
    for parser in ("deepseek_r1", None):
        args = ServerArgs(port=0, served_model_name=["r1"], reasoning_parser=parser)
        with (
            serve_in_background(llm, args) as server,
            openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client,
        ):
            message = ask(client, "1").choices[0].message
            if parser is None:
                assert message.content == "one and\n\ntwo" and message.reasoning_content is None
                continue
            assert (message.reasoning_content, message.content) == ANSWERS["1"]
            assert added_up(ask(client, "1", stream=True))[:2] == ANSWERS["1"]
            assert ask(client, "4").choices[0].message.reasoning_content == "it ends </thin", "others stay hidden"
            shown = ask(client, "4", extra_body={"skip_special_tokens": False}).choices[0].message
            assert shown.reasoning_content == "it never ends </thin"
    llm.shutdown()
