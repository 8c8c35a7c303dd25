"""Finished requests of the core, put together as the caller's RequestOutput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request


@dataclass
class PromptGroup:
    """One prompt of the caller and its n samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    samples: list[Request] = field(default_factory=list)

    def output(self, decode: Callable[[list[int]], str] | None) -> RequestOutput:
        """The caller's view of the finished samples; `decode` None leaves the text empty."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [self._completion(index, request, decode) for index, request in enumerate(self.samples)],
            num_cached_tokens=sum(request.num_cached_tokens for request in self.samples),
        )

    def _completion(self, index: int, request: Request, decode: Callable[[list[int]], str] | None) -> CompletionOutput:
        tokens = request.output_token_ids
        ended_by_stop_token = request.stop_reason is not None
        shown = tokens[:-1] if ended_by_stop_token else tokens
        is_eos = request.stop_reason in self.eos_token_ids and request.stop_reason not in self.params.stop_token_ids
        return CompletionOutput(
            index=index,
            text=decode(shown) if decode is not None and self.params.detokenize else "",
            token_ids=tokens,
            sampled_logprobs=request.output_logprobs,
            cumulative_logprob=sum(request.output_logprobs),
            finish_reason=request.finish_reason,
            stop_reason=None if is_eos else request.stop_reason,
            top_logprobs=None if self.params.logprobs is None else _top_logprobs(request, tokens),
        )


def _top_logprobs(request: Request, tokens: list[int]) -> list[dict[int, Logprob]]:
    """Per position: the sampled token first, then the most likely ones asked for."""
    if not request.output_top:
        return [{token: Logprob(value)} for token, value in zip(tokens, request.output_logprobs, strict=True)]
    positions = []
    for token, value, (rank, ids, values) in zip(tokens, request.output_logprobs, request.output_top, strict=True):
        entry = {token: Logprob(value, rank)}
        for place, (other, other_value) in enumerate(zip(ids, values, strict=True), start=1):
            entry.setdefault(other, Logprob(other_value, place))
        positions.append(entry)
    return positions
