"""The HTTP server through the official client: answers equal the engine's, and no client hurts another."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import openai
import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from tests.vllm.serving import server_process, wait_until, write_served_checkpoint
from verl.utils.net_utils import accepts_connections
from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.api_server import ApiServer, bind, main, serve_in_background
from vllm.entrypoints.openai.cli_args import ServerArgs, parse_args

MODEL = "tiny"
MAX_QUEUE = 100
MAX_BODY = 50_000
TIMEOUT_S = 2.0
ARGS = ServerArgs(
    port=0,
    served_model_name=MODEL,
    max_queue_size=MAX_QUEUE,
    max_body_bytes=MAX_BODY,
    request_timeout=TIMEOUT_S,
    shutdown_timeout=1,
)
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n"
)
LONG = {"max_tokens": 500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_served_checkpoint(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def server(checkpoint: str) -> Iterator[ApiServer]:
    with serve_in_background(LLM(checkpoint, max_num_seqs=80, num_gpu_blocks_override=4000), ARGS) as server:
        yield server


@pytest.fixture
def client(server: ApiServer) -> Iterator[openai.OpenAI]:
    with client_of(server.url) as client:
        yield client
    wait_until(lambda: server.engine.num_unfinished_samples == 0)


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=60)


def post(url: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of a body sent as it is, however malformed."""
    with raw(url) as connection:
        connection.sendall(HEAD % len(body) + body)
        return answer(connection)


def raw(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    received = b""
    while part := connection.recv(65536):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else {}


def get(url: str, path: str) -> tuple[int, str]:
    with raw(url) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        received = b""
        while part := connection.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def test_an_answer_is_what_the_engine_generates(server: ApiServer, client: openai.OpenAI) -> None:
    params = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 2, "logprobs": 2}
    got = client.completions.create(model=MODEL, prompt=["one", "two words"], **params)
    with server.paused():
        wanted = server.engine.llm.generate(["one", "two words"], SamplingParams(**params))
    samples = [sample for output in wanted for sample in output.outputs]
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in got.choices] == [sample.text for sample in samples]
    assert [choice.finish_reason for choice in got.choices] == [sample.finish_reason for sample in samples]
    for choice, sample in zip(got.choices, samples, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx(sample.sampled_logprobs, abs=1e-5)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(sample.token_ids)
        assert all(len(top) <= 3 for top in choice.logprobs.top_logprobs)
    assert got.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in wanted)
    assert got.usage.completion_tokens == sum(len(sample.token_ids) for sample in samples)


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "prompt": "stream", "max_tokens": 20, "seed": 3, "n": 3, "logprobs": 1}
    whole = client.completions.create(**body)
    texts, tokens, reasons, usage = [""] * 3, [[], [], []], [None] * 3, None
    for chunk in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_a_chat_is_the_completion_of_its_rendered_messages(client: openai.OpenAI) -> None:
    params = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    rendered = client.completions.create(prompt="[system]be brief[user]hi[assistant]", **params)
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **params)
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == rendered.choices[0].text
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    assert all(len(position.top_logprobs) == 2 for position in chat.choices[0].logprobs.content)
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **params))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == rendered.choices[0].text
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)


@pytest.mark.parametrize("is_chat", [True, False])
def test_token_ids_come_where_they_are_asked_for(client: openai.OpenAI, is_chat: bool) -> None:
    params: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 1, "seed": 1, "n": 2}
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    params |= {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    asked = {"extra_body": {"return_token_ids": True, "skip_special_tokens": False}}
    whole = create(**params, **asked)
    [of_prompt] = {tuple((whole if is_chat else choice).prompt_token_ids) for choice in whole.choices}
    assert len(of_prompt) == whole.usage.prompt_tokens
    assert sum(len(choice.token_ids) for choice in whole.choices) == whole.usage.completion_tokens
    again = client.completions.create(**params | {"prompt": list(of_prompt)}, **asked) if not is_chat else whole
    assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in whole.choices]
    streamed, prompts = {0: [], 1: []}, []
    for chunk in create(**params, **asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.token_ids or []
            prompts += [found for found in ((chunk if is_chat else choice).prompt_token_ids,) if found]
    assert streamed == {choice.index: choice.token_ids for choice in whole.choices}
    assert prompts == [list(of_prompt)] * (1 if is_chat else 2)
    plain = create(**params)
    assert [choice.token_ids for choice in plain.choices] == [None, None]


def test_stop_strings_and_echo(client: openai.OpenAI) -> None:
    params = {"model": MODEL, "prompt": "abc", "temperature": 0, "max_tokens": 30}
    text = client.completions.create(**params).choices[0].text
    stop = text[10:12]
    cut = client.completions.create(**params, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    echoed = client.completions.create(**params | {"max_tokens": 2}, echo=True, logprobs=0).choices[0]
    assert echoed.text == "abc" + text[:2]
    assert echoed.logprobs.tokens[:3] == ["a", "b", "c"] and echoed.logprobs.text_offset[:3] == [0, 1, 2]
    assert echoed.logprobs.token_logprobs[0] is None and all(p < 0 for p in echoed.logprobs.token_logprobs[1:])


BAD_BODIES = {
    "not json": (b"{", 400, "JSON"),
    "not an object": (b"[1]", 400, "object"),
    "no body": (b"", 400, "required"),
    "not utf-8": (b'{"prompt": "\xff"}', 400, "pars"),
    "deeply nested": (b'{"prompt":' + b"[" * 20_000, 400, "pars"),
    "no prompt": (b'{"max_tokens": 1}', 400, "prompt: Field required"),
    "empty prompt": (b'{"prompt": []}', 400, "prompt is empty"),
    "prompt of another type": (b'{"prompt": {"a": 1}}', 400, "prompt"),
    "another model": (b'{"prompt": "a", "model": "gpt-9"}', 404, "gpt-9"),
    "too many tokens": (json.dumps({"prompt": "a" * 700}).encode(), 400, "700 tokens"),
    "token outside": (b'{"prompt": [1, 99999]}', 400, "99999"),
    "nothing to generate": (b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens=0"),
    "negative temperature": (b'{"prompt": "a", "temperature": -1}', 400, "temperature=-1"),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    "too many logprobs": (b'{"prompt": "a", "logprobs": 21}', 400, "limit of 20"),
    "more than the context": (b'{"prompt": "abc", "max_tokens": 638}', 400, "640 tokens (--max-model-len), and this"),
    "prompt_logprobs of a stream": (b'{"prompt": "a", "prompt_logprobs": 1, "stream": true}', 400, "stream=true"),
    "too many prompt_logprobs": (b'{"prompt": "a", "prompt_logprobs": 21}', 400, "limit of 20"),
    "more than ever fits": (b'{"prompt": "a", "n": 101}', 400, "exceed the 100"),
    "usage without stream": (b'{"prompt": "a", "stream_options": {}}', 400, "stream=true"),
}


@pytest.mark.parametrize("name", sorted(BAD_BODIES))
def test_a_malformed_request_is_told_what_is_wrong(server: ApiServer, name: str) -> None:
    body, status, text = BAD_BODIES[name]
    got_status, got = post(server.url, body)
    assert got_status == status, got
    assert text in got["error"]["message"] and got["error"]["type"] == "invalid_request_error"


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-300},
    {"temperature": 1e308},
    {"temperature": 1e-38, "top_p": 1e-300, "min_p": 1.0},
    {"top_k": 2**62},
    {"top_k": 10**30},
    {"top_p": 5e-324},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e300},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {str(token): -100 for token in range(258)}},
    {"allowed_token_ids": [99999]},
    {"allowed_token_ids": [7], "bad_words": ["\x05"]},
    {"bad_words": ["a" * 2000]},
    {"stop_token_ids": [-5]},
    {"stop": ["\ud800"]},
    {"stop": "x" * 30_000},
    {"seed": -(2**63)},
    {"seed": 2**64},
    {"max_tokens": 10**30},
    {"min_tokens": 2, "allowed_token_ids": [1]},
    {"priority": 10**30},
    {"priority": -(2**63)},
    {"prompt": "\x00\uffff\ud83d"},
    {"prompt": [10**30]},
    {"n": 10**30},
    {"model": "\ud83d"},
    {"\ud83d": 1},
    {"logprobs": 20, "n": 3, "stream": True},
]


def test_extreme_values_are_answered_or_refused_and_break_nothing(server: ApiServer) -> None:
    for extreme in EXTREMES:
        body = {"prompt": "a", "max_tokens": 2} | extreme
        with raw(server.url) as connection:
            text = json.dumps(body).encode()
            connection.sendall(HEAD % len(text) + text)
            status = connection.recv(65536).split()[1]
        assert status in (b"200", b"400", b"404"), extreme
        assert get(server.url, "/health")[0] == 200, extreme


def test_the_log_probs_of_a_prompt(server: ApiServer, client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "extra_body": {"prompt_logprobs": 1}}
    with server.paused():
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        outputs = server.engine.llm.generate(["one", "two", "[user]x[assistant]"], params)
    wanted = [output.prompt_logprobs for output in outputs]
    got = client.completions.create(model=MODEL, prompt=["one", "two"], **body)
    found = [choice.model_extra["prompt_logprobs"] for choice in got.choices]
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], **body)
    for ours, theirs in zip(wanted, [*found, chat.model_extra["prompt_logprobs"]], strict=True):
        assert ours is not None and ours[0] is theirs[0] is None
        for position, shown in zip(ours[1:], theirs[1:], strict=True):
            assert position is not None and [str(token) for token in position] == list(shown)
            for one, entry in zip(position.values(), shown.values(), strict=True):
                assert entry["logprob"] == pytest.approx(one.logprob, abs=1e-5)
                assert (entry["rank"], entry["decoded_token"]) == (one.rank, one.decoded_token)
    fits = client.completions.create(model=MODEL, prompt="abc", max_tokens=637, extra_body={"ignore_eos": True})
    assert fits.usage is not None and fits.usage.total_tokens == 640, "the last token of the context is used"


def test_texts_and_conversations_as_tokens_and_back(server: ApiServer, client: openai.OpenAI) -> None:
    def ask(route: str, **body: Any) -> Any:
        return client.post(f"{server.url}/{route}", body=body, cast_to=object)

    tokenizer = server.engine.llm.get_tokenizer()
    text = "is 1 + 2 = 3? é"
    ids = tokenizer.encode(text)
    answer = {"count": len(ids), "max_model_len": 640, "tokens": ids, "token_strs": None}
    assert ask("tokenize", model=MODEL, prompt=text) == answer
    assert ask("detokenize", model=MODEL, tokens=ids) == {"prompt": text}
    conversation = ask("tokenize", messages=[{"role": "user", "content": "é"}], return_token_strs=True)
    assert conversation["tokens"] == tokenizer.encode("[user]é[assistant]", add_special_tokens=False)
    assert conversation["token_strs"][:3] == ["[", "u", "s"] and conversation["count"] == len(conversation["tokens"])
    assert client.get(f"{server.url}/version", cast_to=object) == {"version": "0.9.1"}
    for body, message in (
        ({"promt": "x"}, "prompt: Field required"),
        ({"messages": []}, "messages: List should have"),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"},
            "without --trust-request-chat-template",
        ),
        ({"prompt": "x", "model": "gpt-9"}, "'gpt-9' is not served here; it serves 'tiny'"),
    ):
        with pytest.raises(openai.APIStatusError, match=message):
            ask("tokenize", **body)
    with pytest.raises(openai.BadRequestError, match="token id 9999 is outside"):
        ask("detokenize", tokens=[9999])


def test_prometheus_reads_the_metrics(server: ApiServer, client: openai.OpenAI) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    client.completions.create(model=MODEL, prompt="abcd", max_tokens=3)
    families = {family.name: family for family in parser.text_string_to_metric_families(get(server.url, "/metrics")[1])}
    assert families["vllm:prompt_tokens"].type == "counter" and families["vllm:num_requests_running"].type == "gauge"
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"
    assert all(family.samples for family in families.values())


def test_errors_reach_the_client_as_its_own(server: ApiServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown role wizard"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "wizard", "content": "x"}])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], top_logprobs=1)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.APIStatusError) as too_large:
        client.completions.create(model=MODEL, prompt="x" * 2 * MAX_BODY)
    assert too_large.value.status_code == 413
    with raw(server.url) as connection:
        connection.sendall(b"this is not HTTP\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert get(server.url, "/nothing")[0] == 404 and get(server.url, "/v1/completions")[0] == 405


def test_models_health_and_metrics(server: ApiServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    before = metrics(server.url)
    client.completions.create(model=MODEL, prompt="abcd", max_tokens=3, extra_body={"ignore_eos": True})
    after = metrics(server.url)
    labels = f'{{model_name="{MODEL}"}}'
    assert after[f"vllm:prompt_tokens_total{labels}"] - before[f"vllm:prompt_tokens_total{labels}"] == 4
    assert after[f"vllm:generation_tokens_total{labels}"] - before[f"vllm:generation_tokens_total{labels}"] == 3
    assert after[f"vllm:num_requests_running{labels}"] == 0
    assert get(server.url, "/health")[0] == 200


def metrics(url: str) -> dict[str, float]:
    lines = get(url, "/metrics")[1].splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_64_streams_beside_bad_clients_all_arrive(server: ApiServer, client: openai.OpenAI) -> None:
    prompts = [f"client {index}: " + "x" * (index % 7) for index in range(64)]
    options = {"model": MODEL, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    is_over = threading.Event()
    with ThreadPoolExecutor() as pool:
        mischief = [pool.submit(act, server.url, is_over) for act in (malformed, oversized, slow, leaving)]
        try:
            texts = asyncio.run(stream_all(server.url, prompts, options))
        finally:
            is_over.set()
        for act in mischief:
            act.result()
    alone = client.completions.create(prompt=prompts[:8], seed=0, **options)
    assert texts[:8] == [choice.text for choice in alone.choices]
    assert all(texts)
    assert get(server.url, "/health")[0] == 200


async def stream_all(url: str, prompts: list[str], options: dict[str, Any]) -> list[str]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def one(prompt: str) -> str:
            text, reason, num_chunks = "", None, 0
            async for chunk in await client.completions.create(prompt=prompt, seed=0, stream=True, **options):
                text, reason, num_chunks = text + chunk.choices[0].text, chunk.choices[0].finish_reason, num_chunks + 1
            assert reason == "length" and num_chunks > 1
            return text

        return await asyncio.gather(*map(one, prompts))


def malformed(url: str, is_over: threading.Event) -> None:
    while not is_over.wait(0.02):
        assert post(url, b'{"prompt": ')[0] == 400


def oversized(url: str, is_over: threading.Event) -> None:
    while not is_over.wait(0.1):
        assert post(url, b"x" * 4 * MAX_BODY)[0] == 413


def slow(url: str, is_over: threading.Event) -> None:
    with raw(url) as connection:
        for byte in b"POST /v1/completions HTTP/1.1\r\n" * 1000:
            if is_over.wait(0.05):
                return
            try:
                connection.send(bytes([byte]))
            except OSError:
                return  # cut, as it should be


def leaving(url: str, is_over: threading.Event) -> None:
    body = json.dumps({"prompt": "bye", "max_tokens": 500, "stream": True}).encode()
    while not is_over.wait(0.1):
        with raw(url) as connection:
            connection.sendall(HEAD % len(body) + body)
            connection.recv(10)


def test_a_client_that_leaves_ends_its_request(server: ApiServer, client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="long", stream=True, **LONG)
    next(iter(stream))
    assert server.engine.num_unfinished_samples == 1
    stream.close()
    wait_until(lambda: server.engine.num_unfinished_samples == 0)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt="long", timeout=0.1, **LONG)
    wait_until(lambda: server.engine.num_unfinished_samples == 0)


def test_a_full_queue_refuses_until_there_is_room(client: openai.OpenAI) -> None:
    with client.completions.create(model=MODEL, prompt="full", n=MAX_QUEUE, stream=True, **LONG) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match=f"limit of {MAX_QUEUE}"):
            client.completions.create(model=MODEL, prompt="one more")
    patient = client.with_options(max_retries=10)
    assert patient.completions.create(model=MODEL, prompt="one more", max_tokens=1).choices


def test_slow_clients_are_cut_off(server: ApiServer) -> None:
    started = time.monotonic()
    with raw(server.url) as silent, raw(server.url) as half_a_head, raw(server.url) as half_a_body:
        half_a_head.sendall(HEAD[:30])
        half_a_body.sendall(HEAD % 100 + b'{"prompt"')
        assert silent.recv(100) == b""
        assert answer(half_a_head)[0] == 408
        status, body = answer(half_a_body)
        assert status == 408 and "did not come within" in body["error"]["message"]
    assert TIMEOUT_S * 0.9 < time.monotonic() - started < TIMEOUT_S + 10


def test_a_client_that_does_not_read_is_cut_off(server: ApiServer) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 8, "stream": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: server.engine.num_unfinished_samples > 0)
        wait_until(lambda: server.engine.num_unfinished_samples == 0, 30)
    assert metrics(server.url)[f'vllm:requests_aborted_total{{model_name="{MODEL}"}}'] > 0


def test_a_pause_lets_requests_finish_or_cuts_them(server: ApiServer, client: openai.OpenAI) -> None:
    with client.completions.create(model=MODEL, prompt="long", stream=True, **LONG) as stream:
        next(iter(stream))
        with server.paused(drain_s=0.05):
            assert server.engine.llm.generate("mine", SamplingParams(max_tokens=2))[0].finished
            with pytest.raises(openai.APIError, match="taken for something else"):
                list(stream)
    assert client.completions.create(model=MODEL, prompt="after", max_tokens=1).choices


def test_no_request_survives_a_failed_step_and_none_hangs(checkpoint: str) -> None:
    llm = LLM(checkpoint, num_gpu_blocks_override=200)
    with serve_in_background(llm, ARGS) as server, client_of(server.url) as client:
        stream = client.completions.create(model=MODEL, prompt="long", stream=True, **LONG)
        next(iter(stream))
        llm.core.worker.cache.caches.clear()
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)
        wait_until(lambda: server.uvicorn.should_exit and server.has_failed)


def test_a_server_that_cannot_start_raises_the_cause_and_leaves_nothing(checkpoint: str) -> None:
    llm, others = LLM(checkpoint, num_gpu_blocks_override=200), set(threading.enumerate())
    with bind("127.0.0.1", 0) as listener:
        server = ApiServer(llm, ARGS, listener)
        stack_bytes = threading.stack_size(2**47 - 2**12)  # no address space has room for it
        try:
            with pytest.raises(RuntimeError, match="the server cannot start: can't start new thread"):
                server.run()
        finally:
            threading.stack_size(stack_bytes)
        server = ApiServer(llm, ARGS, listener)
    with pytest.raises(OSError, match="Bad file descriptor"), server.in_background(20):  # the listener is closed
        raise AssertionError("a dead server was handed out")
    assert not server.engine.is_running
    try:
        with serve_in_background(llm, ARGS, 0.0):  # a quick one has started by then
            pass
    except TimeoutError as error:
        assert "did not start within 0 s" in str(error)
    assert not {thread.name for thread in set(threading.enumerate()) - others} & {"api-server", "engine"}
    with serve_in_background(llm, ARGS) as served:
        assert get(served.url, "/health")[0] == 200


def test_the_command_ends_with_an_error_when_the_app_cannot_start(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: threading.stack_size(2**47 - 2**12))  # just before it serves
    try:
        assert main([checkpoint, "--port", "0", "--num-gpu-blocks-override", "200"]) == 2
    finally:
        threading.stack_size(0)
    assert "error: the server cannot start: can't start new thread" in capsys.readouterr().err


class _Watched(PreTrainedTokenizerFast):
    threads: ClassVar[set[str]] = set()

    def decode(self, *args: Any, **options: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return super().decode(*args, **options)


def test_the_event_loop_never_decodes(checkpoint: str) -> None:
    llm = LLM(checkpoint, num_gpu_blocks_override=200)
    llm.get_tokenizer().__class__ = _Watched  # the server's copies are of this class too
    with serve_in_background(llm, ARGS) as server, client_of(server.url) as client:
        ask = {"model": MODEL, "max_tokens": 3, "temperature": 0}
        for is_stream in (False, True):
            for more in ({"logprobs": 2}, {"logprobs": 1, "echo": not is_stream}):
                answer = client.completions.create(prompt="ab", stream=is_stream, **ask, **more)
                parts = answer if is_stream else [answer]
                assert sum(len(part.choices[0].logprobs.tokens) for part in parts) in (3, 5)
            chat: Any = client.chat.completions.create(
                messages=[{"role": "user", "content": "x"}], stream=is_stream, logprobs=True, top_logprobs=3, **ask
            )
            positions = [one for part in (chat if is_stream else [chat]) for one in part.choices[0].logprobs.content]
            assert len(positions) == 3 and all(len(one.top_logprobs) == 3 for one in positions)
    assert _Watched.threads == {"engine", "tokenizer_0"}


def test_without_a_chat_template_chats_are_refused_and_a_key_is_asked_for(tmp_path: Path) -> None:
    llm = LLM(write_served_checkpoint(tmp_path / "model", chat_template=None), num_gpu_blocks_override=200)
    with serve_in_background(llm, ServerArgs(port=0, api_key="secret")) as server:
        messages: Any = [{"role": "user", "content": "x"}]
        with client_of(server.url, "secret") as client, pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model=llm.config.model.model, messages=messages)
        with client_of(server.url, "guess") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert get(server.url, "/health")[0] == 200


def test_kill_and_restart_leave_no_process_and_no_port(checkpoint: str) -> None:
    options = ("--num-gpu-blocks-override", "400", "--shutdown-timeout", "1")
    with server_process(checkpoint, 0, *options) as (process, port):
        url = f"http://127.0.0.1:{port}"
        with client_of(url) as client:
            next(iter(client.completions.create(model=checkpoint, prompt="long", stream=True, **LONG)))
            assert psutil.Process(process.pid).children(recursive=True) == []
            process.kill()
            process.wait(10)
    arguments = ["--model", checkpoint, "--port", str(port), *options]
    again = multiprocessing.get_context("forkserver").Process(target=serve_aside, args=(arguments,), daemon=True)
    again.start()
    wait_until(lambda: accepts_connections("127.0.0.1", port), timeout_s=60)
    with client_of(url) as client:
        stream = client.completions.create(model=checkpoint, prompt="long", stream=True, **LONG)
        next(iter(stream))
        again.terminate()
        again.join(15)
        assert again.exitcode == 0
    bind("127.0.0.1", port).close()


def serve_aside(arguments: list[str]) -> None:
    sys.exit(main(arguments))


def test_a_taken_port_and_bad_arguments_are_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(OSError, match="cannot listen on .* choose another --port"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(SystemExit):
        parse_args(["--model", "x", "--port", "70000", "--max-body-bytes", "0", "--chat-template", "/not/there"])
    message = capsys.readouterr().err
    assert "port=70000" in message and "max_body_bytes=0" in message and "/not/there" in message
    server, engine, notes = parse_args(
        ["--model", "x", "--enable-prefix-caching", "--cudagraph-capture-sizes", "1", "8"]
    )
    assert server.host == "127.0.0.1"
    assert engine.enable_prefix_caching and engine.cudagraph_capture_sizes == [1, 8] and engine.max_model_len is None
    assert notes == []
