"""The engine's state of one sample of one prompt."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.sample.extras import SamplingExtras

if TYPE_CHECKING:
    import numpy as np


class RequestStatus(Enum):
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; its blocks are freed and must be computed again
    FINISHED = "finished"


class Request:
    """One sequence: its tokens, how many of them are in the KV cache, and the blocks that hold them."""

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_ids",
        "detokenizer",
        "extras",
        "finish_reason",
        "home",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_top_logprobs",
        "output_logprobs",
        "output_top",
        "policy_starts",
        "priority",
        "prompt_logprobs",
        "prompt_top",
        "request_id",
        "routed_experts",
        "seed",
        "status",
        "stop_ids",
        "stop_reason",
        "temperature",
        "token_ids",
        "top_k",
        "top_p",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        max_tokens: int,
        seed: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        num_top_logprobs: int = 0,
        num_prompt_logprobs: int | None = None,
        extras: SamplingExtras | None = None,
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)  # prompt, then output
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_tokens  # already cut so that prompt and output fit max_model_len
        self.min_tokens = min_tokens
        self.stop_ids = stop_ids  # tokens that end the sample, EOS included unless ignored
        self.seed = seed  # uint64
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.num_top_logprobs = num_top_logprobs
        self.num_prompt_logprobs = num_prompt_logprobs  # as num_top_logprobs, None: no log-probs of the prompt
        self.extras = extras  # None for most requests
        self.detokenizer: IncrementalDetokenizer | None = None  # of a queued request with stop strings
        self.priority = priority  # lower goes first
        self.arrival = 0  # the scheduler's count of the requests it was given
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of the first admission, found in the prefix cache
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[int] = []  # content hashes of leading full blocks, as far as they were needed
        self.num_registered_blocks = 0  # leading blocks that the pool can find by content
        self.output_logprobs: list[float] = []
        self.output_top: list[tuple[int, list[int], list[float]]] = []  # per token: its rank, top ids, top log-probs
        self.prompt_logprobs: list[float] = []  # of the prompt tokens but the first, by the raw model
        self.prompt_top: list[tuple[int, list[int], list[float]]] = []  # of the same, as output_top
        self.policy_starts: list[tuple[int, int]] = []  # (index of an output token, policy version from there on)
        self.routed_experts: np.ndarray | None = None  # of a finished request, see CompletionOutput
        self.home: tuple[int, int] | None = None  # (DP rank that was asked for it, its key there) once it has moved
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None  # the stop token or the stop string

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

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
        for index, (begin, version) in enumerate(self.policy_starts):
            is_last = index + 1 == len(self.policy_starts)
            end = self.num_output_tokens if is_last else self.policy_starts[index + 1][0]
            versions += [version] * (end - max(begin, start))
        return versions

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
