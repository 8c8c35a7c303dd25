"""How to sample a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request, under vLLM's names.

    temperature 0 is greedy. top_k 0 or -1 and top_p 1 do not limit. max_tokens None goes to max_model_len. Neither
    EOS nor stop tokens are among the first `min_tokens`. `seed` makes the result independent of the batch, of n and of
    the layout; sample i of n is seeded by derive_seed(seed, i), sample 0 by the seed itself. `logprobs` k adds the k
    most likely tokens of each position to the sampled one, whose log-prob is always returned.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        problems = []
        if self.n < 1:
            problems.append(f"n={self.n} must be at least 1")
        if not self.temperature >= 0:
            problems.append(f"temperature={self.temperature} must be 0 (greedy) or more")
        if self.top_k < -1:
            problems.append(f"top_k={self.top_k} must be 0 or -1 (no limit) or positive")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p} must be in (0, 1]")
        if self.max_tokens is not None and self.max_tokens < 1:
            problems.append(f"max_tokens={self.max_tokens} must be at least 1")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            problems.append(f"min_tokens={self.min_tokens} must be between 0 and max_tokens={self.max_tokens}")
        if self.logprobs is not None and self.logprobs < 0:
            problems.append(f"logprobs={self.logprobs} must be None or at least 0")
        if problems:
            raise ValueError("SamplingParams: " + "; ".join(problems))
