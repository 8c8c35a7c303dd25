"""Prompt forms that LLM.generate accepts."""

from __future__ import annotations

from typing import TypeAlias, TypedDict


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    """A prompt given as text."""

    prompt: str


PromptType: TypeAlias = str | TokensPrompt | TextPrompt
