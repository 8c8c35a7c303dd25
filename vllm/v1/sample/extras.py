"""Rarely used sampling settings, kept apart so that other requests pay nothing for them. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import LazyTokenizer


@dataclass(frozen=True)
class SamplingExtras:
    """Everything beyond temperature, top-k, top-p and stop tokens, in tokens; named as in SamplingParams."""

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not hold
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether logits are edited or tokens banned."""
        return self.has_penalties or bool(self.logit_bias or self.bad_words or self.allowed_token_ids)


NO_EXTRAS = SamplingExtras()


def sampling_extras(params: SamplingParams, tokenizer: LazyTokenizer | None) -> SamplingExtras | None:
    """Return the extras of a request; None when it has none, as most."""
    extras = SamplingExtras(
        min_p=0.0 if params.is_greedy else params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(sorted((params.logit_bias or {}).items())),
        allowed_token_ids=None if params.allowed_token_ids is None else tuple(sorted(set(params.allowed_token_ids))),
        bad_words=_tokenized(params.bad_words, tokenizer),
        stop=params.stop_strings,
        include_stop_str_in_output=params.include_stop_str_in_output if params.stop_strings else False,
        skip_special_tokens=params.skip_special_tokens if params.stop_strings else True,
    )
    return None if extras == NO_EXTRAS else extras


def sampling_problems(
    params: SamplingParams, eos_token_ids: tuple[int, ...], vocab_size: int, tokenizer: LazyTokenizer | None
) -> list[str]:
    """Return the reasons why this model cannot sample so; empty when it can."""
    problems = [
        f"{name} holds {token}, outside of the vocabulary of {vocab_size}"
        for name, tokens in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or {}),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        )
        for token in tokens
        if not 0 <= token < vocab_size
    ]
    if tokenizer is None:
        problems += [
            f"{name} holds text, but the engine has no tokenizer (skip_tokenizer_init=True)"
            for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words))
            if texts
        ]
    if problems:
        return problems
    banned = {word[-1] for word in _tokenized(params.bad_words, tokenizer)}
    if params.min_tokens > 0:
        banned.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    num_left = vocab_size - len(banned)
    if params.allowed_token_ids is not None:
        num_left = len(set(params.allowed_token_ids) - banned)
    if num_left < 1:
        return ["bad_words, and min_tokens with its stop tokens, may leave no token to draw; allow more tokens"]
    return []


def _tokenized(words: Iterable[str], tokenizer: LazyTokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Each word as a text begins with it, and behind a space where only the first token is another one then."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        assert tokenizer is not None, word
        alone, behind_space = (
            tuple(tokenizer.load().encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
        )
        sequences[alone] = None
        if behind_space[0] != alone[0] and len(behind_space) == len(alone):
            sequences[behind_space] = None
    return tuple(sequences)
