"""What LLM.generate returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class Resumable(Protocol):
    """The unfinished samples of a request; ``LLM`` queues them again, here or in another engine."""

    def resumed(self, name: str, request_id: str, priority: int) -> Any: ...


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
    sampled_logprobs: list[float]  # of each token by EngineArgs.logprobs_mode, else log_softmax(logits / temperature)
    cumulative_logprob: float
    # "stop", "length", "abort" when cut before its end, "error" when no token could be drawn, None while it runs
    finish_reason: str | None
    # The stop string or the one of stop_token_ids that ended it, None for EOS; of an error what was wrong.
    stop_reason: int | str | None = None
    top_logprobs: list[dict[int, Logprob]] | None = None  # per position: the most likely tokens and the sampled one
    policy_versions: list[int] = field(default_factory=list)  # per token: the policy version that it was drawn from
    # [tokens, MoE layers, K], uint8 or int16, with EngineArgs.enable_return_routed_experts: the experts that each token
    # of prompt and output went to but the last, which was never an input; None before the sample has ended. A token
    # that was computed again, after a preemption or a cut, has the experts of the last time.
    routed_experts: np.ndarray | None = None

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """vLLM's form, per position {token id: Logprob}; None when SamplingParams.logprobs was None."""
        return self.top_logprobs


@dataclass
class RequestOutput:
    """All samples of one prompt; while it runs, those that got a token in the last step."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True  # every sample has ended
    num_cached_tokens: int = 0  # prompt tokens of all samples that were not computed again thanks to prefix caching
    # With SamplingParams.prompt_logprobs, per prompt token: log_softmax(logits) of the model; None for the first token.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    # The samples of a generation that was cut before its end; LLM.generate can continue them. It may be pickled.
    resumable: Resumable | None = None
