"""How to sample a request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SMALLEST_TEMPERATURE = 1e-5  # below it sampling is greedy
_LARGEST_PENALTY = 1e6
_NO_FORM = "structured outputs are not supported; allowed_token_ids limits tokens"
_NOT_THERE = {
    "structured_outputs": _NO_FORM,
    "guided_decoding": _NO_FORM,
    "logits_processors": "code of users does not run in the engine; logit_bias changes logits",
    "best_of": "ask for n and choose",
    "truncate_prompt_tokens": "a prompt is taken whole: shorten it",
    "thinking_token_budget": "a thought has no limit of its own; max_tokens limits the answer",
    "repetition_detection": "no sample ends because it repeats itself; repetition_penalty makes that rarer",
    "logprob_token_ids": "logprobs are those of the most likely tokens",
    "flat_logprobs": "log-probs are dicts",
    "extra_args": "there are no plug-ins that read them",
}


class RequestOutputKind(Enum):
    """What a stream of outputs holds: all so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request, under vLLM's names.

    temperature 0 is greedy, and so is one below 1e-5, as in vLLM: logits over it would be infinite. top_k 0 or -1,
    top_p 1 and min_p 0 do not limit. max_tokens None goes to max_model_len. Neither EOS nor stop tokens are among the
    first `min_tokens`, and no stop string that ends there ends the sample. `seed` makes the result independent of the
    batch, of n and of the layout; sample i of n is seeded by derive_seed(seed, i), sample 0 by the seed itself.
    `logprobs` k adds the k most likely tokens of each position to the sampled one, whose log-prob is always returned;
    `prompt_logprobs` k does so for the prompt, by the raw model.

    repetition_penalty divides positive logits of all tokens of prompt and output and multiplies negative ones;
    frequency_penalty times a token's count in the output and presence_penalty once are subtracted. logit_bias is added
    before them. A sample holds only allowed_token_ids (EOS too must be among them), and no sequence of bad_words.
    These tokenizers put no spaces between special tokens, whatever `spaces_between_special_tokens` says.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of LLMEngine.add_request
    # Of vLLM, and not here: whatever asks for something is refused.
    structured_outputs: Any = field(default=None, repr=False, kw_only=True)
    guided_decoding: Any = field(default=None, repr=False, kw_only=True)
    logits_processors: Any = field(default=None, repr=False, kw_only=True)
    best_of: Any = field(default=None, repr=False, kw_only=True)
    truncate_prompt_tokens: Any = field(default=None, repr=False, kw_only=True)
    thinking_token_budget: Any = field(default=None, repr=False, kw_only=True)
    repetition_detection: Any = field(default=None, repr=False, kw_only=True)
    logprob_token_ids: Any = field(default=None, repr=False, kw_only=True)
    flat_logprobs: Any = field(default=None, repr=False, kw_only=True)
    extra_args: Any = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        problems = [
            *self._unsupported(),
            *self._length_problems(),
            *self._distribution_problems(),
            *self._text_problems(),
        ]
        if problems:
            raise ValueError("SamplingParams: " + "; ".join(problems))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _unsupported(self) -> Iterator[str]:
        for name, reason in _NOT_THERE.items():
            asked = getattr(self, name)
            if asked and not (name == "best_of" and asked == self.n):
                yield f"{name}={asked!r}: {reason}"

    def _length_problems(self) -> Iterator[str]:
        if self.n < 1:
            yield f"n={self.n} must be at least 1"
        if self.max_tokens is not None and self.max_tokens < 1:
            yield f"max_tokens={self.max_tokens} must be at least 1"
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            yield f"min_tokens={self.min_tokens} must be between 0 and max_tokens={self.max_tokens}"
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count < 0:
                yield f"{name}={count} must be None or at least 0"

    def _distribution_problems(self) -> Iterator[str]:
        if not 0 <= self.temperature < math.inf:
            yield f"temperature={self.temperature} must be 0 (greedy) or more"
        if not -1 <= self.top_k < 2**31:
            yield f"top_k={self.top_k} must be 0 or -1 (no limit) or positive, below 2**31"
        if not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p} must be in (0, 1]"
        if not 0 <= self.min_p <= 1:
            yield f"min_p={self.min_p} must be in [0, 1]"
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                yield f"{name}={getattr(self, name)} must be in [-2, 2]"
        if not 1 / _LARGEST_PENALTY <= self.repetition_penalty <= _LARGEST_PENALTY:
            yield (
                f"repetition_penalty={self.repetition_penalty} must be between {1 / _LARGEST_PENALTY:g} and "
                f"{_LARGEST_PENALTY:g}: it multiplies logits"
            )
        strange = [f"{token}: {bias}" for token, bias in (self.logit_bias or {}).items() if not -100 <= bias <= 100]
        if strange:
            yield f"logit_bias holds {', '.join(strange)}, expected biases in [-100, 100]"
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            yield "allowed_token_ids is empty, no token could be drawn; leave it out to allow all"

    def _text_problems(self) -> Iterator[str]:
        for name, texts in (("stop", self.stop_strings), ("bad_words", self.bad_words)):
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                yield f"{name}={texts!r} must be a list of strings"
            elif not all(texts):
                yield f"{name} holds an empty string"
        if any(text and not str(text).strip() for text in self.bad_words):
            yield "bad_words holds white space alone"
        if self.stop_strings and not self.detokenize:
            yield "stop strings need detokenize=True; use stop_token_ids without text"


class StructuredOutputsParams:
    """Raises ValueError: outputs cannot be constrained to a form; clients import the name in any case."""

    def __init__(self, **form: object) -> None:
        asked = ", ".join(name for name, value in form.items() if value is not None) or "a form"
        raise ValueError(f"structured outputs ({asked}) are not supported; allowed_token_ids limits tokens")


class GuidedDecodingParams(StructuredOutputsParams):
    """vLLM's earlier name of `StructuredOutputsParams`."""
