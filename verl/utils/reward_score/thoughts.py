"""The end of a prompt, which says whether its template opened or closed a thought before the answer begins.

A reward function does not get the prompt. Every row's ``extra_info`` has the last characters of its text instead, after
the chat template and with special tokens, under ``PROMPT_END``; the templates of DeepSeek-R1, QwQ and Qwen3's thinking
models end with ``<think>``, that of Qwen3 without thinking with ``<think>\\n\\n</think>\\n\\n``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<think>", "</think>"
PROMPT_END = "prompt_end"
_CHARS, _TOKENS = 64, 64  # a token has at least a byte, so that 64 of them hold the longest tag of any tokenizer


def prompt_end(tokenizer: Any, prompt_ids: Sequence[int]) -> str:
    """The value of ``PROMPT_END``: the last characters of a prompt, with special tokens."""
    tail = [int(token) for token in prompt_ids[-_TOKENS:]]
    return str(tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False))[-_CHARS:]


def last_tag(extra_info: Mapping[str, Any] | None) -> str | None:
    """The tag with which the prompt ended: ``<think>``, ``</think>``, "" for neither; None when nobody says it."""
    end = (extra_info or {}).get(PROMPT_END)
    if not isinstance(end, str):
        return None
    return next((tag for tag in (OPEN, CLOSE) if end.rstrip().endswith(tag)), "")


def with_opened_thought(solution_str: str, extra_info: Mapping[str, Any] | None) -> str:
    """The answer, behind ``<think>`` where the prompt had written that tag for it."""
    return OPEN + solution_str if last_tag(extra_info) == OPEN else solution_str
