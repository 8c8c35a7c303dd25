"""The engine's state of one sample of one prompt."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np

from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.sample.extras import SamplingExtras

TopLogprobs: TypeAlias = tuple[int, list[int], list[float]]
"""Of a token: its rank, the most likely ids and their log-probs."""


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; its blocks are freed and must be computed again
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: its tokens, how many of them are in the KV cache, and the blocks that hold them."""

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    _: KW_ONLY
    max_tokens: int  # already cut so that prompt and output fit max_model_len
    seed: int = 0  # uint64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()  # tokens that end the sample, EOS included unless ignored
    num_top_logprobs: int = 0
    num_prompt_logprobs: int | None = None  # as num_top_logprobs, None: no log-probs of the prompt
    extras: SamplingExtras | None = None  # None for most requests
    priority: int = 0  # lower goes first
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_prompt_tokens: int = field(init=False)
    detokenizer: IncrementalDetokenizer | None = None  # of a queued request with stop strings
    arrival: int = 0  # the scheduler's count of the requests it was given
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the first admission, found in the prefix cache
    num_preemptions: int = 0
    # Steps that verified drafts of it, these drafts, and those of them that were right.
    draft_counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)  # of the contents of leading full blocks, as far as needed
    num_registered_blocks: int = 0  # leading blocks that the pool can find by content
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # of all prompt tokens but the first, by the raw model
    prompt_top: list[TopLogprobs] = field(default_factory=list)  # of the same tokens
    policy_starts: list[tuple[int, int]] = field(default_factory=list)  # (output token, policy version from there on)
    routed_experts: np.ndarray | None = None  # of a finished request, see CompletionOutput
    home: tuple[int, int] | None = None  # (DP rank that was asked for it, its key there) once it has moved
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token, the stop string, or of an error what was wrong

    def __post_init__(self, prompt_token_ids: list[int]) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def longest(self) -> int:
        """The tokens of prompt and output that it may come to."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt log-probs are missing, so that the prompt must not come from the prefix cache."""
        return self.num_prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def note_policy(self, version: int) -> None:
        """The next output tokens are drawn from the weights of this version."""
        if not self.policy_starts or self.policy_starts[-1][1] != version:
            self.policy_starts.append((self.num_output_tokens, version))

    def policy_versions(self, start: int = 0) -> list[int]:
        """The version of the weights that each output token from the `start`-th on was drawn from."""
        versions: list[int] = []
        ends = [*(begin for begin, _ in self.policy_starts[1:]), self.num_output_tokens]
        for (begin, version), end in zip(self.policy_starts, ends, strict=False):
            versions += [version] * (end - max(begin, start))
        return versions

    def fail(self, problem: str) -> None:
        """End the request without a further token."""
        self.finish_reason, self.stop_reason = "error", problem

    def append(self, token: int, logprob: float) -> bool:
        """Take a sampled token; True when it ends the request."""
        self.token_ids.append(token)
        self.output_logprobs.append(logprob)
        num_output = len(self.output_logprobs)
        if token in self.stop_ids and num_output >= self.min_tokens:
            self.finish_reason, self.stop_reason = "stop", token
            return True
        if self.detokenizer is not None and self.detokenizer.push(token):
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_reason
            return True
        if num_output >= self.max_tokens:
            self.finish_reason = "length"
            return True
        return False
