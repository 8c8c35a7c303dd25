"""Rarely used sampling settings, kept apart so that other requests pay nothing for them. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


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
