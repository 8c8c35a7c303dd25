"""/v1/chat/completions."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import re
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from hf_formats.chat import with_text_content
from vllm.entrypoints.chat_utils import conversation_prompt
from vllm.entrypoints.openai.cli_args import ServerArgs
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
    Conversation,
    DeltaMessage,
    PositionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    ToolCall,
    UsageInfo,
)
from vllm.entrypoints.openai.serving_engine import (
    AnswerBuilder,
    OpenAIServing,
    finite,
    prompt_logprobs,
    unless_client_leaves,
)
from vllm.entrypoints.sampling_defaults import SamplingDefaults
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.reasoning import REASONING_PARSERS, DeepSeekR1ReasoningParser
from vllm.tool_parsers import TOOL_PARSERS, FunctionCall, ToolParser
from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


class OpenAIServingChat(OpenAIServing):
    """Answers conversations, rendered by the server's `chat_template` or else the tokenizer's own."""

    def __init__(self, engine: AsyncLLM, args: ServerArgs, metrics: ServerMetrics, defaults: SamplingDefaults) -> None:
        super().__init__(engine, args, metrics, defaults)
        self.chat_template, self._takes_templates = args.template(), args.trust_request_chat_template
        self.parser = None if args.reasoning_parser is None else REASONING_PARSERS[args.reasoning_parser]
        self._renderer_names = set(inspect.signature(self.tokenizer.apply_chat_template).parameters)
        self.tool_parser: ToolParser | None = None
        self._has_tried_tools = False
        if args.enable_auto_tool_choice and args.tool_call_parser is not None:
            # On the loop's thread: a tokenizer is not thread-safe.
            self.tool_parser = TOOL_PARSERS[args.tool_call_parser](copy.deepcopy(self.tokenizer))
        tags = set() if self.parser is None else set(self.parser.tags)
        starts = set() if self.tool_parser is None else set(self.tool_parser.starts)
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        self._hidden = {True: _all_but(special, tags | starts), False: _all_but(special, tags)}  # with tools or without

    async def create_chat_completion(self, body: ChatCompletionRequest, request: Request) -> Response:
        self.check_model(body.model)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = self.sampling_params(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
        tools = body.shown_tools
        if tools and self.tool_parser is None:
            known = ", ".join(TOOL_PARSERS)
            raise ApiError(
                400,
                "tools: this server cannot act on it: it was started without --enable-auto-tool-choice "
                f"--tool-call-parser NAME (of {known})",
                "tools",
            )
        hidden = self._hidden[tools is not None] if params.skip_special_tokens else None
        if hidden is not None:
            params = dataclasses.replace(params, skip_special_tokens=False)
        text = await self.off_loop(lambda: self.render(body))
        prompt = await self.off_loop(lambda: self.encode(text, bool(body.add_special_tokens)))
        self.check_length([prompt], None if max_tokens is None else params.max_tokens)
        collector = await unless_client_leaves(request, self.submit("chatcmpl", [prompt], params, body.priority))
        parsers: list[DeepSeekR1ReasoningParser] = []
        if self.parser is not None:
            written = str(_message(body.messages[-1]).get("content", "")) if body.continue_final_message else ""
            parsers = [self.parser(text, written) for _ in range(params.n)]
        calls = self.tool_parser if tools else None
        return await _ChatAnswer(self, body, collector, [prompt], parsers, hidden, calls).respond(request)

    def render(self, body: Conversation) -> str:
        """The conversation as text, the special tokens included; runs on the tokenizer's thread."""
        if body.chat_template is not None and not self._takes_templates:
            raise ApiError(400, "chat_template: the server was started without --trust-request-chat-template")
        template = self.chat_template if body.chat_template is None else body.chat_template
        if template is None and self.tokenizer.chat_template is None:
            raise ApiError(
                400,
                f"the tokenizer of {self.model_names[0]!r} has no chat template: use /v1/completions, or start the "
                "server with --chat-template FILE",
            )
        extra = dict(body.chat_template_kwargs or {})
        taken = sorted(self._renderer_names & set(extra))
        if taken:
            raise ApiError(400, f"chat_template_kwargs must not hold {', '.join(taken)}", "chat_template_kwargs")
        messages = [_message(message) for message in body.messages]
        extra["add_generation_prompt"] = body.add_generation_prompt
        extra["continue_final_message"] = body.continue_final_message
        try:
            text = conversation_prompt(self.tokenizer, messages, template, tools=body.shown_tools, **extra)
            if body.shown_tools and not self._has_tried_tools:
                self._has_tried_tools = True
                if text == conversation_prompt(self.tokenizer, messages, template, **extra):
                    logger.warning("the chat template shows the model no tools; --chat-template FILE gives another")
            return text
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error


@dataclasses.dataclass
class _Held:
    """A sample's tokens, and the end of its text that is a call or may become one."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    is_begun: bool = False  # other text stood before


@dataclasses.dataclass
class _ChatAnswer(AnswerBuilder[ChatCompletionRequest]):
    """The choices of one conversation; in a stream the first chunk of each has the role."""

    parsers: Sequence[DeepSeekR1ReasoningParser]  # of each choice; none without a reasoning parser
    hidden: re.Pattern[str] | None  # what is left out of texts
    tool_parser: ToolParser | None  # none without tools
    _held: dict[int, _Held] = dataclasses.field(default_factory=dict, init=False)  # of each choice
    _started: set[int] = dataclasses.field(default_factory=set, init=False)
    _has_shown_prompt: bool = dataclasses.field(default=False, init=False)
    _prompt_logprobs: PromptLogprobs | None = dataclasses.field(default=None, init=False)

    def choices(self, prompt: int, output: RequestOutput, sample: CompletionOutput) -> list[Choice]:
        self._prompt_logprobs = prompt_logprobs(self.body, output)
        thought, text = self._divided(sample)
        text, calls = (text, []) if self.tool_parser is None else self._called(self.tool_parser, sample, text)
        last: dict[str, Any] = {
            "logprobs": self._logprobs(sample),
            "finish_reason": "tool_calls" if calls and sample.finish_reason == "stop" else sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if not self.body.stream:
            # As vLLM has it: an answer that never begins is null.
            content = (text or None) if self.parsers or calls else text
            message = AssistantMessage(content=content, reasoning=thought, tool_calls=calls or None)
            return [ChatChoice(index=sample.index, **last, message=message)]
        is_answer = thought is None or (not thought and self.parsers[sample.index].is_answering)
        parts: dict[str, Any] = {"reasoning": thought, "content": text, "tool_calls": calls}
        deltas = [{name: part} for name, part in parts.items() if part]  # clients look for one of them in a chunk
        deltas = deltas or [{"content" if is_answer else "reasoning": ""}]
        if sample.index not in self._started:
            deltas[0]["role"] = "assistant"
            self._started.add(sample.index)
        chunks = [ChatStreamChoice(index=sample.index, delta=DeltaMessage(**delta)) for delta in deltas[:-1]]
        return [*chunks, ChatStreamChoice(index=sample.index, **last, delta=DeltaMessage(**deltas[-1]))]

    def _called(self, parser: ToolParser, sample: CompletionOutput, text: str) -> tuple[str, list[ToolCall]]:
        """What is new of the text before the calls of a sample; the calls when it has ended, if all are whole."""
        held = self._held.setdefault(sample.index, _Held())
        held.token_ids += sample.token_ids
        held.text += text
        num_shown, calls = parser.num_shown(held.text, held.is_begun), list[FunctionCall]()
        if sample.finish_reason is not None:
            calls = self._calls(parser, sample.index)
            if not calls or not all(call.is_whole for call in calls):
                calls, num_shown = [], len(held.text)
        shown, held.text = held.text[:num_shown], held.text[num_shown:]
        held.is_begun = held.is_begun or bool(shown.strip())
        found = []
        for number, call in enumerate(calls[:1] if self.body.parallel_tool_calls is False else calls):
            index = number if self.body.stream else None
            found.append(ToolCall(index=index, **call.as_message(f"call_{uuid.uuid4().hex}")))
        return shown, found

    def _calls(self, parser: ToolParser, index: int) -> list[FunctionCall]:
        """Those of a whole sample. A thought may be about calls; its end is a token in published models."""
        token_ids = self._held[index].token_ids
        if self.parsers:
            end = parser.token(self.parsers[index].tags[1])
            token_ids = token_ids[token_ids.index(end) + 1 :] if end in token_ids else token_ids
            if not self.parsers[index].is_answering:
                return []
        return parser.extract_tool_calls(token_ids)[1]

    def _divided(self, sample: CompletionOutput) -> tuple[str | None, str]:
        """What is new of the thought, None without a reasoning parser, and of the answer."""
        text = sample.text if self.hidden is None else self.hidden.sub("", sample.text)
        if not self.parsers:
            return None, text
        return self.parsers[sample.index].extract(text, sample.finish_reason is not None)

    def message(self, choices: Sequence[Any], usage: UsageInfo | None) -> BaseModel:
        shown = self.prompts[0] if self.body.return_token_ids and not self._has_shown_prompt else None
        self._has_shown_prompt = True
        common = self.head() | {"choices": list(choices), "usage": usage, "prompt_token_ids": shown}
        if self.body.stream:
            return ChatCompletionStreamResponse(**common)
        return ChatCompletionResponse(**common, prompt_logprobs=self._prompt_logprobs)

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


def _all_but(special: set[str], tags: set[str]) -> re.Pattern[str] | None:
    """What goes out of texts where a tag is a special token, so that the engine leaves all of them in; else None."""
    others = sorted(special - tags, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, others)) or "(?!)") if special & tags else None


def _message(message: ChatMessage) -> dict[str, Any]:
    """The message as the template gets it: a field that is null, or a list of no tool calls, is as if not there."""
    fields = message.model_dump(exclude_none=True)
    if fields.get("tool_calls") == []:
        del fields["tool_calls"]
    if fields.get("reasoning") is not None:  # as this server names a thought; templates know its other name
        fields.setdefault("reasoning_content", fields["reasoning"])
    return with_text_content(fields)
