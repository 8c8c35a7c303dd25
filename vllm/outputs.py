"""What LLM.generate returns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """One token's log-prob at a position; rank 1 is the most likely token (None when not asked for)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str
    token_ids: list[int]  # the end or stop token included
    sampled_logprobs: list[float]  # log_softmax(logits / temperature) of each token, before top-k and top-p
    cumulative_logprob: float
    finish_reason: str | None  # "stop" or "length"
    stop_reason: int | None = None  # the stop token when one of stop_token_ids ended the sample, None for EOS
    top_logprobs: list[dict[int, Logprob]] | None = None  # per position: the most likely tokens and the sampled one

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """vLLM's form, per position {token id: Logprob}; None when SamplingParams.logprobs was None."""
        return self.top_logprobs


@dataclass
class RequestOutput:
    """All samples of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int = 0  # prompt tokens of all samples that were not computed again thanks to prefix caching
