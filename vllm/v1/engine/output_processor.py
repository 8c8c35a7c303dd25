"""The outputs of prompts for callers of `LLM` and the server, from the requests that the engine runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.request import Request, RequestStatus, TopLogprobs

Decode = Callable[[list[int]], str]


@dataclass
class PromptGroup:
    """One prompt of the caller, called `name` in messages, and its n samples."""

    name: str
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    samples: list[Request] = field(default_factory=list)

    @property
    def unfinished(self) -> list[Request]:
        return [request for request in self.samples if request.status is not RequestStatus.FINISHED]

    @property
    def is_finished(self) -> bool:
        return not self.unfinished

    def sample_id(self, index: int) -> str:
        """The request id of a sample."""
        return f"{self.request_id}_{index}"

    def output(self, decode: Decode | None) -> RequestOutput:
        """Return all samples as they are; `decode` None leaves the text empty. Unfinished samples can be continued."""
        completions = []
        for index, request in enumerate(self.samples):
            completions.append(self.completion(index, request, self._text(request, decode), decode=decode))
            if request.status is not RequestStatus.FINISHED:
                completions[-1].finish_reason = "abort"
        output = self.request_output(completions, decode)
        output.resumable = None if output.finished else self
        return output

    def resumed(self, name: str, request_id: str, priority: int) -> PromptGroup:
        """A copy whose unfinished samples can be queued again, here or in another engine."""
        group = copy.deepcopy(self)
        group.name, group.request_id = name, request_id
        for index, request in enumerate(group.samples):
            request.request_id, request.priority, request.home = group.sample_id(index), priority, None
        return group

    def _text(self, request: Request, decode: Decode | None) -> str:
        if decode is None:
            return ""
        if request.detokenizer is not None and isinstance(request.stop_reason, str):
            request.detokenizer.catch_up(request.output_token_ids)  # it may have ended on another replica
            return request.detokenizer.text
        return decode(self.shown_tokens(request))

    def request_output(self, completions: list[CompletionOutput], decode: Decode | None) -> RequestOutput:
        """The group with these of its samples."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            finished=self.is_finished,
            num_cached_tokens=sum(request.num_cached_tokens for request in self.samples),
            prompt_logprobs=None if self.params.prompt_logprobs is None else _prompt_logprobs(self.samples[0], decode),
        )

    def completion(
        self, index: int, request: Request, text: str, start: int = 0, decode: Decode | None = None
    ) -> CompletionOutput:
        """The sample's tokens from its `start`-th on."""
        tokens = request.token_ids[request.num_prompt_tokens + start :]
        logprobs = request.output_logprobs[start:]
        is_eos = request.stop_reason in self.eos_token_ids and request.stop_reason not in self.params.stop_token_ids
        top_logprobs = None
        if self.params.logprobs is not None:
            top_logprobs = _top_logprobs(tokens, logprobs, request.output_top[start:], decode)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tokens,
            sampled_logprobs=logprobs,
            cumulative_logprob=sum(logprobs),
            finish_reason=request.finish_reason,
            stop_reason=None if is_eos else request.stop_reason,
            top_logprobs=top_logprobs,
            policy_versions=request.policy_versions(start),
            routed_experts=request.routed_experts,
        )

    def shown_tokens(self, request: Request, start: int = 0) -> list[int]:
        """The output tokens that make the sample's text from the `start`-th on: all but the token that stopped it."""
        end = -1 if isinstance(request.stop_reason, int) else None
        return request.token_ids[request.num_prompt_tokens + start : end]


def prompt_of(sample_id: str) -> str:
    """The request id of the prompt that a sample belongs to."""
    return sample_id.rpartition("_")[0]


class OutputStream:
    """The outputs of a group for its caller: by `kind` after every step, or at its end."""

    def __init__(self, group: PromptGroup, kind: RequestOutputKind, decode: Decode | None) -> None:
        self.group, self.kind, self.decode = group, kind, decode
        self._num_shown = [0] * len(group.samples)
        self._failed: set[int] = set()  # samples whose error, without a token, was shown
        self._texts = [""] * len(group.samples)
        self._cumulative_logprobs = [0.0] * len(group.samples)
        self._detokenizers: list[IncrementalDetokenizer] = []
        if kind is not RequestOutputKind.FINAL_ONLY and decode is not None:
            self._detokenizers = [request.detokenizer or IncrementalDetokenizer(decode) for request in group.samples]

    def next(self) -> RequestOutput | None:
        """Return the output of the last step for the samples that got a token; None when there is nothing to show."""
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return self.group.output(self.decode) if self.group.is_finished else None
        completions = [
            self._advance(index, request)
            for index, request in enumerate(self.group.samples)
            if request.num_output_tokens > self._num_shown[index] or self._has_just_failed(index, request)
        ]
        return self.group.request_output(completions, self.decode) if completions else None

    def _has_just_failed(self, index: int, request: Request) -> bool:
        is_new = request.finish_reason == "error" and index not in self._failed
        if is_new:
            self._failed.add(index)
        return is_new

    def _advance(self, index: int, request: Request) -> CompletionOutput:
        group, shown, text = self.group, self._num_shown[index], ""
        if self._detokenizers:
            is_finished = request.status is RequestStatus.FINISHED
            new_tokens = group.shown_tokens(request, shown) if request.detokenizer is None else []
            text = self._detokenizers[index].append(new_tokens, is_finished)
        self._num_shown[index] = request.num_output_tokens
        if self.kind is RequestOutputKind.CUMULATIVE:
            self._texts[index] += text
            return group.completion(index, request, self._texts[index], decode=self.decode)
        completion = group.completion(index, request, text, shown, self.decode)
        self._cumulative_logprobs[index] += completion.cumulative_logprob
        completion.cumulative_logprob = self._cumulative_logprobs[index]
        return completion


def _prompt_logprobs(request: Request, decode: Decode | None) -> list[dict[int, Logprob] | None]:
    """Per token of the prompt, as far as they are computed; None for the first, which nothing predicts."""
    tokens = request.token_ids[1 : 1 + len(request.prompt_logprobs)]
    return [None, *_top_logprobs(tokens, request.prompt_logprobs, request.prompt_top, decode)]


def _top_logprobs(
    tokens: list[int], logprobs: list[float], top: list[TopLogprobs], decode: Decode | None
) -> list[dict[int, Logprob]]:
    """Per position: its token first, then the most likely ones asked for."""

    def named(token: int, value: float, rank: int | None) -> Logprob:
        return Logprob(value, rank, None if decode is None else decode([token]))

    if not top:
        return [{token: named(token, value, None)} for token, value in zip(tokens, logprobs, strict=True)]
    positions = []
    for token, value, (rank, ids, values) in zip(tokens, logprobs, top, strict=True):
        entry = {token: named(token, value, rank)}
        for place, (other, other_value) in enumerate(zip(ids, values, strict=True), start=1):
            if other != token and other_value > -math.inf:
                entry[other] = named(other, other_value, place)
        positions.append(entry)
    return positions
