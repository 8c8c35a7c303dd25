"""Answers to GSM8K's problems (upstream: ``verl.utils.reward_score.gsm8k``)."""

from __future__ import annotations

import re
from fractions import Fraction

_LOOKED_AT = 300  # characters at the end of an answer: regular expressions are slow on long ones
# Behind the mark there may be emphasis, a box or a dollar sign.
_MARKED = re.compile(r"####(?:[\s*_`$]|\\[(\[$]|\\boxed\{)*(-?\$?[0-9.,]+)")
_SAME = str.maketrans({"\u2212": "-", **{chr(0xFF10 + digit): str(digit) for digit in range(10)}})
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The last number after ``####`` (``strict``), or the last number at all (``flexible``); None without one.

    Commas and dollar signs are left out.
    """
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d)", "", solution_str[-_LOOKED_AT:].translate(_SAME))
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
    return score if _same_number(answer, ground_truth) else format_score


def _same_number(answer: str, truth: str) -> bool:
    plain = [text.replace(",", "").rstrip(".") for text in (answer, truth)]
    is_decimal = all(re.fullmatch(r"-?\d{1,40}(?:\.\d{1,40})?", text) for text in plain)
    return Fraction(plain[0]) == Fraction(plain[1]) if is_decimal else plain[0] == plain[1]
