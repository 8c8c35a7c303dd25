"""What both kinds of completion share: prompts as tokens, sampling parameters, outputs, token texts, streams."""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.cli_args import ServerArgs
from vllm.entrypoints.openai.errors import ApiError, to_api_error
from vllm.entrypoints.openai.metrics import ServerMetrics
from vllm.entrypoints.openai.protocol import Choice, GenerationRequest, PromptLogprobs, PromptTokensDetails, UsageInfo
from vllm.entrypoints.openai.request_log import note
from vllm.entrypoints.sampling_defaults import SamplingDefaults
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM, RequestOutputCollector

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")
Body = TypeVar("Body", bound=GenerationRequest)

# Fields of a request that are fields of SamplingParams, by the same name.
SAMPLING_FIELDS = {one.name for one in fields(SamplingParams)} & GenerationRequest.model_fields.keys() - {"max_tokens"}
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


class OpenAIServing:
    """One engine as the handlers see it."""

    def __init__(self, engine: AsyncLLM, args: ServerArgs, metrics: ServerMetrics, defaults: SamplingDefaults) -> None:
        self.engine, self.max_logprobs, self.metrics, self.defaults = engine, args.max_logprobs, metrics, defaults
        self.model_names = args.model_names(engine.llm.config.model.model)
        self.max_model_len = engine.llm.config.model.max_model_len
        # The engine's thread decodes with its own copy: a tokenizer is not thread-safe.
        self.tokenizer: PreTrainedTokenizerBase = copy.deepcopy(engine.llm.get_tokenizer())
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._token_texts: dict[int, str] = {}

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        if name not in (None, *self.model_names):
            known = " and ".join(map(repr, self.model_names))
            raise ApiError(404, f"the model {name!r} is not served here; it serves {known}", "model", "model_not_found")

    def sampling_params(self, body: GenerationRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters of a request; ApiError for a value that the engine refuses."""
        for name, count in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
            if count is not None and count > self.max_logprobs:
                raise ApiError(400, f"{name}={count} exceeds the server's limit of {self.max_logprobs}", name)
        asked = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
        given: dict[str, Any] = self.defaults.values | asked
        if self.defaults.max_tokens is not None:
            max_tokens = min(self.defaults.max_tokens, max_tokens or self.defaults.max_tokens)
        if isinstance(given.get("logit_bias"), dict):
            given["logit_bias"] = _token_keys(given["logit_bias"])
        kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        try:
            return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind)
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error)) from error

    def check_length(self, prompts: Sequence[list[int]], max_tokens: int | None) -> None:
        """ApiError when a prompt with `max_tokens` more would exceed the context; None takes what is left of it."""
        longest = max(map(len, prompts))
        if max_tokens is not None and longest + max_tokens > self.max_model_len:
            raise ApiError(
                400,
                f"the context of this model is {self.max_model_len} tokens (--max-model-len), and this request needs "
                f"{longest + max_tokens}: {longest} tokens of the prompt and max_tokens={max_tokens}; shorten either",
                "max_tokens",
                "context_length_exceeded",
            )

    async def off_loop(self, call: Callable[[], Result]) -> Result:
        """Run work on the tokenizer outside of the event loop, one piece at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, call)

    async def submit(
        self, kind: str, prompts: Sequence[list[int]], params: SamplingParams, priority: int
    ) -> RequestOutputCollector:
        """Hand prompts to the engine under a new name that begins with `kind`; ApiError when it does not take them."""
        if len(prompts) * params.n > self.engine.max_queue_size:
            raise ApiError(
                400,
                f"{len(prompts)} prompts of n={params.n} samples exceed the {self.engine.max_queue_size} that the "
                "server takes at once: send fewer",
            )
        tokens = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        try:
            return await self.engine.add_requests(f"{kind}-{uuid.uuid4().hex}", tokens, params, priority)
        except Exception as error:
            raise to_api_error(error) from error

    def encode(self, text: str, with_special_tokens: bool) -> list[int]:
        """Runs on the tokenizer's thread."""
        try:
            return self.tokenizer.encode(text, add_special_tokens=with_special_tokens)
        except Exception as error:  # such as half of a surrogate pair, which is valid JSON and not valid UTF-8
            raise ApiError(400, f"the prompt cannot be tokenized: {error}", "prompt") from error

    def token_text(self, token: int) -> str:
        """The text of one token alone, of those that `learn_texts` has seen."""
        return self._token_texts[token]

    async def learn_texts(self, tokens: Iterable[int]) -> None:
        """Decode tokens for `token_text`, on the tokenizer's thread."""
        new = set(tokens) - self._token_texts.keys()
        if new:
            texts = await self.off_loop(lambda: {one: str(self.tokenizer.decode([one])) for one in new})
            self._token_texts.update(texts)


@dataclass
class AnswerBuilder(ABC, Generic[Body]):
    """Puts the answer to one body together from the engine's outputs, whole or as a stream of chunks."""

    serving: OpenAIServing
    body: Body
    collector: RequestOutputCollector
    prompts: Sequence[list[int]]

    def __post_init__(self) -> None:
        self.num_samples, self.created = self.body.n or 1, int(time.time())
        self._prompt_tokens, self._completion_tokens, self._cached_tokens = sum(map(len, self.prompts)), 0, 0
        self._finished: Counter[str] = Counter()  # samples by finish reason

    @abstractmethod
    def choices(self, prompt: int, output: RequestOutput, sample: CompletionOutput) -> list[Choice]:
        """The choice of one sample, whole or what is new of it, in a stream in one or more chunks."""

    def shown_tokens(self, output: RequestOutput) -> Iterator[int]:
        """The tokens that the choices of an output name one by one, as log-probs do."""
        for sample in output.outputs:
            if sample.top_logprobs is not None:
                yield from sample.token_ids
                for entry in sample.top_logprobs:
                    yield from entry

    @abstractmethod
    def message(self, choices: Sequence[Choice], usage: UsageInfo | None) -> BaseModel:
        """The answer, or a chunk of it."""

    def head(self) -> dict[str, Any]:
        """The fields that all chunks of an answer have in common."""
        return {"id": self.collector.name, "created": self.created, "model": self.serving.model_names[0]}

    async def respond(self, request: Request) -> Response:
        """The response to the client, during which the engine works; its requests end with it, however it ends."""
        if self.body.stream:
            return EventStream(self._events(), lambda: self._end(request))
        try:
            answer = await unless_client_leaves(request, self._whole())
        finally:
            self._end(request)
        return Response(answer.model_dump_json(), media_type="application/json")

    def _end(self, request: Request) -> None:
        self.serving.engine.abort(self.collector)
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._finished.items()) or "none finished"
        counts = f"{self._prompt_tokens} prompt tokens, {self._completion_tokens} generated ({reasons})"
        note(request.scope, f"{self.collector.name}, {counts}")

    async def _events(self) -> AsyncIterator[str]:
        """Chunks as they come; then the usage, if wanted."""
        async for choices in self._choices():
            yield "".join(_event(self.message([choice], None)) for choice in choices)
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield _event(self.message([], self._usage()))

    async def _whole(self) -> BaseModel:
        choices = [choice async for batch in self._choices() for choice in batch]
        return self.message(sorted(choices, key=lambda choice: choice.index), self._usage())

    async def _choices(self) -> AsyncIterator[list[Choice]]:
        """The choices of each batch of outputs, counted in the metrics; ApiError when the engine gives up."""
        metrics, started, is_first = self.serving.metrics, self.collector.created_s, bool(self.body.stream)
        index_of = {name: index for index, name in enumerate(self.collector.request_ids)}
        try:
            async for batch in self.collector:
                if is_first:
                    metrics.time_to_first_token.observe(time.monotonic() - started)
                    is_first = False
                choices: list[Choice] = []
                await self.serving.learn_texts(token for output in batch for token in self.shown_tokens(output))
                for output in batch:
                    metrics.prompt_tokens += len(output.prompt_token_ids) if output.finished else 0
                    self._cached_tokens += output.num_cached_tokens if output.finished else 0
                    for sample in output.outputs:
                        metrics.generation_tokens += len(sample.token_ids)
                        self._completion_tokens += len(sample.token_ids)
                        if sample.finish_reason is not None:
                            metrics.finished[sample.finish_reason] += 1
                            self._finished[sample.finish_reason] += 1
                        found = self.choices(index_of[output.request_id], output, sample)
                        if self.body.return_token_ids:
                            found[-1].token_ids = list(sample.token_ids)
                        choices += found
                yield choices
        except (RuntimeError, ValueError) as error:
            raise to_api_error(error) from error
        metrics.request_latency.observe(time.monotonic() - started)

    def _usage(self) -> UsageInfo:
        """The tokens of all prompts, each counted once, and of all choices."""
        # Samples after the first always find their prompt in the cache; only the first shows hits on earlier requests.
        details = PromptTokensDetails(cached_tokens=self._cached_tokens) if self.num_samples == 1 else None
        return UsageInfo(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=details,
        )


class EventStream(StreamingResponse):
    """Server-sent events: those of `events`, then [DONE] or an error.

    Calls `on_end` at the end, after an error and after a disconnect alike.
    """

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(_with_end(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _event(body: BaseModel) -> str:
    return f"data: {body.model_dump_json()}\n\n"


async def _with_end(events: AsyncIterator[str]) -> AsyncIterator[str]:
    try:
        async for text in events:
            yield text
    except ApiError as error:  # the status has been sent: the error can only be an event
        yield f"data: {error.body()}\n\n"
    else:
        yield "data: [DONE]\n\n"


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs(body: GenerationRequest, output: RequestOutput) -> PromptLogprobs | None:
    """vLLM's list of the prompt's log-probs, where the body asks for it."""
    if body.prompt_logprobs is None or output.prompt_logprobs is None:
        return None
    return [
        position and {token: replace(one, logprob=finite(one.logprob)) for token, one in position.items()}
        for position in output.prompt_logprobs
    ]


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client left")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise ApiError(400, "logit_bias: its keys must be token ids", "logit_bias") from None
