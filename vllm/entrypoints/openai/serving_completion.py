"""/v1/completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.protocol import (
    Choice,
    CompletionChoice,
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    UsageInfo,
)
from vllm.entrypoints.openai.serving_engine import (
    AnswerBuilder,
    OpenAIServing,
    finite,
    prompt_logprobs,
    unless_client_leaves,
)
from vllm.outputs import CompletionOutput, Logprob, RequestOutput

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class OpenAIServingCompletion(OpenAIServing):
    """Continues prompts."""

    async def create_completion(self, body: CompletionRequest, request: Request) -> Response:
        self.check_model(body.model)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = self.sampling_params(body, max_tokens, body.logprobs)
        if body.echo and body.logprobs is not None:
            if body.stream:
                raise ApiError(400, "echo with logprobs is not supported for stream=true", "echo")
            if body.prompt_logprobs not in (None, body.logprobs):
                raise ApiError(400, "with echo, logprobs and prompt_logprobs must be the same", "prompt_logprobs")
            params = dataclasses.replace(params, prompt_logprobs=body.logprobs)
        prompts = await self.off_loop(lambda: self._prompts(body))
        self.check_length(prompts, params.max_tokens)
        echoes = await self.off_loop(lambda: self._echoes(body, prompts))
        collector = await unless_client_leaves(request, self.submit("cmpl", prompts, params, body.priority))
        return await _CompletionAnswer(self, body, collector, prompts, echoes).respond(request)

    def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        """The prompts as tokens; runs on the tokenizer's thread."""
        prompt = body.prompt
        if not prompt:
            raise ApiError(400, "prompt is empty: send text, token ids, or a list of either", "prompt")
        parts: Sequence[str | int | list[int]] = [prompt] if isinstance(prompt, str) else prompt
        with_special = body.add_special_tokens is not False
        prompts: list[list[int]] = []
        token_ids = [part for part in parts if isinstance(part, int)]
        if token_ids:
            return [token_ids]
        for part in parts:
            if isinstance(part, str):
                prompts.append(self.encode(part, with_special))
            elif isinstance(part, list):
                prompts.append(part)
        return prompts

    def _echoes(self, body: CompletionRequest, prompts: Sequence[list[int]]) -> list[str]:
        """The text that goes before each prompt's choices."""
        if not body.echo:
            return [""] * len(prompts)
        texts = [
            part for part in ([body.prompt] if isinstance(body.prompt, str) else body.prompt) if isinstance(part, str)
        ]
        return texts or [str(self.tokenizer.decode(tokens)) for tokens in prompts]


@dataclasses.dataclass
class _CompletionAnswer(AnswerBuilder[CompletionRequest]):
    """The choices of one body's prompts, each with its prompt's text before it where that is asked for."""

    echoes: Sequence[str]  # the text before the choices of each prompt
    # Characters of a choice's tokens so far, of those that were streamed.
    _offsets: dict[int, int] = dataclasses.field(default_factory=dict, init=False)

    def choices(self, prompt: int, output: RequestOutput, sample: CompletionOutput) -> list[Choice]:
        index = prompt * self.num_samples + sample.index
        is_first = index not in self._offsets
        echo = self.echoes[prompt] if is_first else ""
        offset = self._offsets.setdefault(index, 0)
        logprobs = None
        if sample.top_logprobs is not None:
            of_prompt = (output.prompt_logprobs or []) if self.body.echo else []
            shown = [*output.prompt_token_ids[: len(of_prompt)], *sample.token_ids]
            logprobs = self._logprobs(shown, [*of_prompt, *sample.top_logprobs], offset or len(echo) * (not of_prompt))
            self._offsets[index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        choice = CompletionChoice(
            index=index,
            text=echo + sample.text,
            logprobs=logprobs,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            prompt_logprobs=prompt_logprobs(self.body, output),
            prompt_token_ids=self.prompts[prompt] if self.body.return_token_ids and is_first else None,
        )
        return [choice]

    def shown_tokens(self, output: RequestOutput) -> Iterator[int]:
        yield from super().shown_tokens(output)
        if self.body.echo and output.prompt_logprobs is not None:
            yield from output.prompt_token_ids
            for entry in output.prompt_logprobs:
                yield from entry or ()

    def message(self, choices: Sequence[Any], usage: UsageInfo | None) -> BaseModel:
        return CompletionResponse(**self.head(), choices=list(choices), usage=usage)

    def _logprobs(
        self, tokens: Sequence[int], positions: Sequence[dict[int, Logprob] | None], offset: int
    ) -> CompletionLogProbs:
        """One entry a token; a position without an entry is a prompt's first token."""
        result, text_of = CompletionLogProbs(top_logprobs=[]), self.serving.token_text
        assert result.top_logprobs is not None
        for token, entry in zip(tokens, positions, strict=True):
            text = text_of(token)
            result.tokens.append(text)
            result.text_offset.append(offset)
            offset += len(text)
            result.token_logprobs.append(None if entry is None else finite(entry[token].logprob))
            top = None if entry is None else {text_of(one): finite(value.logprob) for one, value in entry.items()}
            result.top_logprobs.append(top)
        return result
