"""/v1/chat/completions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

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
    Choice,
    ChoiceLogprobs,
    PositionLogprobs,
    TokenLogprob,
    UsageInfo,
)
from vllm.entrypoints.openai.serving_engine import AnswerBuilder, OpenAIServing, finite, unless_client_leaves
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM


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
        return await _ChatAnswer(self, body, collector, [prompt]).respond(request)

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


class _ChatAnswer(AnswerBuilder[ChatCompletionRequest]):
    """The choices of one conversation; in a stream the first chunk of each has the role."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._started: set[int] = set()

    def choice(self, prompt: int, output: RequestOutput, sample: CompletionOutput) -> Choice:
        common: dict[str, Any] = {
            "index": sample.index,
            "logprobs": self._logprobs(sample),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if not self.body.stream:
            return ChatChoice(**common, message=AssistantMessage(content=sample.text))
        role: Any = None if sample.index in self._started else "assistant"
        self._started.add(sample.index)
        return ChatStreamChoice(**common, delta=AssistantMessage(role=role, content=sample.text))

    def message(self, choices: Sequence[Any], usage: UsageInfo | None) -> BaseModel:
        form = ChatCompletionStreamResponse if self.body.stream else ChatCompletionResponse
        return form(**self.head(), choices=list(choices), usage=usage)

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
