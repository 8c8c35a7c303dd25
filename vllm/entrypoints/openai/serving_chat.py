"""/v1/chat/completions."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.metrics import ServerMetrics
from vllm.entrypoints.openai.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    ChatMessage,
    ChatStreamChoice,
    ChoiceLogprobs,
    PositionLogprobs,
    TokenLogprob,
    UsageInfo,
)
from vllm.entrypoints.openai.serving_engine import OpenAIServing, UsageCount, finite, unless_client_leaves
from vllm.entrypoints.openai.sse import EventStream, event
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM, RequestOutputCollector


class OpenAIServingChat(OpenAIServing):
    """Answers conversations, rendered by `chat_template` or else the tokenizer's own."""

    def __init__(
        self, engine: AsyncLLM, model_name: str, max_logprobs: int, metrics: ServerMetrics, chat_template: str | None
    ) -> None:
        super().__init__(engine, model_name, max_logprobs, metrics)
        self.chat_template = chat_template
        self._renderer_names = set(inspect.signature(self.tokenizer.apply_chat_template).parameters)

    async def create_chat_completion(self, body: ChatCompletionRequest, request: Request) -> Response:
        self.check_model(body.model)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = self.sampling_params(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
        prompt = await self.off_loop(lambda: self._prompt(body))
        collector = await unless_client_leaves(request, self.submit("chatcmpl", [prompt], params, body.priority))
        answer = _Answer(self, body, collector, prompt)
        if body.stream:
            return EventStream(answer.events(), lambda: self.engine.abort(collector))
        try:
            response = await unless_client_leaves(request, answer.whole())
        finally:
            self.engine.abort(collector)
        return Response(response.model_dump_json(), media_type="application/json")

    def _prompt(self, body: ChatCompletionRequest) -> list[int]:
        """The conversation as tokens; runs on the tokenizer's thread."""
        if self.chat_template is None and self.tokenizer.chat_template is None:
            raise ApiError(
                400,
                f"the tokenizer of {self.model_name!r} has no chat template: use /v1/completions, or start the server "
                "with --chat-template FILE",
            )
        extra = body.chat_template_kwargs or {}
        taken = sorted(self._renderer_names & set(extra))
        if taken:
            raise ApiError(400, f"chat_template_kwargs must not hold {', '.join(taken)}", "chat_template_kwargs")
        try:
            text = self.tokenizer.apply_chat_template(
                [_message(message) for message in body.messages],
                chat_template=self.chat_template,
                add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
                continue_final_message=body.continue_final_message,
                tokenize=False,
                **extra,
            )
        except Exception as error:  # whatever a template raises about messages that it refuses
            raise ApiError(400, f"the chat template does not take these messages: {error}", "messages") from error
        # The template writes the special tokens itself.
        return self.encode(str(text), bool(body.add_special_tokens))


class _Answer:
    """The choices of one conversation, put together from the engine's outputs."""

    def __init__(
        self,
        serving: OpenAIServing,
        body: ChatCompletionRequest,
        collector: RequestOutputCollector,
        prompt: list[int],
    ) -> None:
        self.serving, self.body, self.collector = serving, body, collector
        self.usage = UsageCount([prompt], body.n or 1)
        self.created = int(time.time())

    async def events(self) -> AsyncIterator[str]:
        """Chunks as they come, each choice's first one with the role; then the usage, if wanted."""
        started: set[int] = set()
        async for batch in self.serving.outputs(self.collector, is_stream=True):
            texts = []
            for _, output in batch:
                self.usage.add(output)
                for sample in output.outputs:
                    role: Any = None if sample.index in started else "assistant"
                    started.add(sample.index)
                    choice = ChatStreamChoice(
                        index=sample.index,
                        delta=AssistantMessage(role=role, content=sample.text),
                        logprobs=self._logprobs(sample),
                        finish_reason=sample.finish_reason,
                        stop_reason=sample.stop_reason,
                    )
                    texts.append(event(self._chunk([choice])))
            yield "".join(texts)
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield event(self._chunk([], self.usage.info()))

    async def whole(self) -> ChatCompletionResponse:
        samples: list[CompletionOutput] = []
        async for batch in self.serving.outputs(self.collector, is_stream=False):
            for _, output in batch:
                self.usage.add(output)
                samples += output.outputs
        choices = [
            ChatChoice(
                index=sample.index,
                message=AssistantMessage(content=sample.text),
                logprobs=self._logprobs(sample),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
            for sample in samples
        ]
        return ChatCompletionResponse(
            id=self.collector.name,
            created=self.created,
            model=self.serving.model_name,
            choices=choices,
            usage=self.usage.info(),
        )

    def _chunk(self, choices: list[ChatStreamChoice], usage: UsageInfo | None = None) -> ChatCompletionStreamResponse:
        return ChatCompletionStreamResponse(
            id=self.collector.name, created=self.created, model=self.serving.model_name, choices=choices, usage=usage
        )

    def _logprobs(self, sample: CompletionOutput) -> ChoiceLogprobs | None:
        if sample.top_logprobs is None:
            return None
        content = []
        for token, entry in zip(sample.token_ids, sample.top_logprobs, strict=True):
            most_likely = [
                (one, value.logprob) for one, value in entry.items() if one != token or value.rank is not None
            ]
            most_likely = sorted(most_likely, key=lambda pair: -pair[1])[: self.body.top_logprobs or 0]
            top = [self._token(one, value) for one, value in most_likely]
            sampled = self._token(token, entry[token].logprob)
            content.append(PositionLogprobs(**sampled.model_dump(), top_logprobs=top))
        return ChoiceLogprobs(content=content)

    def _token(self, token: int, logprob: float) -> TokenLogprob:
        text = self.serving.token_text(token)
        return TokenLogprob(token=text, logprob=finite(logprob), bytes=list(text.encode()))


def _message(message: ChatMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        fields["content"] = "\n".join(part.text for part in message.content)
    return fields
