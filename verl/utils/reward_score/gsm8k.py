"""Answers to GSM8K's problems (upstream: ``verl.utils.reward_score.gsm8k``)."""

from __future__ import annotations

import re

_LOOKED_AT = 300  # characters at the end of an answer: regular expressions are slow on long ones
_MARKED = re.compile(r"####\s*(-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The last number after ``####`` (``strict``), or the last number at all (``flexible``); None without one.

    Commas and dollar signs are left out.
    """
    text = solution_str[-_LOOKED_AT:]
    if method == "strict":
        found = _MARKED.findall(text)
        return found[-1].replace(",", "").replace("$", "") if found else None
    if method == "flexible":
        numbers = [number for number in _NUMBER.findall(text) if number.strip("-.,")]
        return numbers[-1].replace(",", "") if numbers else None
    raise ValueError(f"method is {method!r}; expected strict or flexible")


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """``score`` for the right number, ``format_score`` for a wrong one, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
