"""Rule reward of R1-Zero: 0.33 for the format, 0.67 for the right answer, with its parts told apart.

Differences from verl's ``recipe/r1_ascend/deepscaler.py``, each where that one can be fooled:

- Format: every tag occurs exactly once, nothing but white space stands before ``<think>``, between ``</think>`` and
  ``<answer>``, or after ``</answer>``, and neither the thought nor the box is empty. Upstream takes repeated tags,
  text anywhere, and empty parts.
- Answer: with a right format it is the last ``\\boxed{}`` of the answer part, so a box in the thought earns nothing.
  Without it, the last box anywhere, as upstream. Missing and unclosed boxes earn nothing.
- Grading: equal integers and equal texts are settled here; all else goes to math-verify's LaTeX parser, which has no
  ``eval``. Upstream's grader hands model text to ``sympy.parse_expr``, which is one.

This module has no time limit of its own: call it in the reward pool's processes (``verl.trainer.ppo.reward``), which
are ended at a wall-clock limit and count the answer as ungraded.
"""

from __future__ import annotations

import logging
import re
from typing import Any

FORMAT_WEIGHT = 0.33
ACCURACY_WEIGHT = 0.67
MAX_ANSWER_CHARS = 512
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

_FORM = re.compile(r"<think>(?P<think>.*)</think>\s*<answer>(?P<answer>.*)</answer>", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,40}")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,(?:\\!)?\d{3})+(?:\.\d+)?")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """Score one response: ``score = 0.33 * format + 0.67 * accuracy``, both parts 0.0 or 1.0 (verl's signature)."""
    answer_part = well_formed_answer(solution_str)
    boxed = last_boxed(answer_part if answer_part is not None else solution_str)
    has_format = float(answer_part is not None)
    accuracy = float(boxed is not None and answers_equal(boxed, str(ground_truth)))
    return {
        "score": FORMAT_WEIGHT * has_format + ACCURACY_WEIGHT * accuracy,
        "format": has_format,
        "accuracy": accuracy,
    }


def well_formed_answer(text: str) -> str | None:
    """The inside of ``<answer>`` when the whole text has the asked form and a non-empty box, else None."""
    stripped = text.strip()
    if any(stripped.count(tag) != 1 for tag in TAGS):
        return None
    match = _FORM.fullmatch(stripped)
    if match is None or not match["think"].strip():
        return None
    boxed = last_boxed(match["answer"])
    return match["answer"] if boxed is not None and boxed.strip() else None


def last_boxed(text: str) -> str | None:
    """What the last ``\\boxed{...}`` holds, braces matched (escaped ones are text); None when missing or unclosed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = position = start + len("\\boxed{")
    depth = 1
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[begin:position]
        position += 1
    return None


def answers_equal(given: str, truth: str) -> bool:
    """Whether two answers are the same number, text or mathematical expression."""
    given, truth = _plain(given), _plain(truth)
    if not given or not truth or len(given) > MAX_ANSWER_CHARS:
        return False
    if given == truth or given.removesuffix("\\%") == truth.removesuffix("\\%"):
        return True
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(truth):
        return int(given) == int(truth)
    return _math_equal(given, truth)


def _plain(answer: str) -> str:
    """Drop what never changes an answer: outer space and dollars, a final full stop, ``\\left``, thousands commas."""
    answer = answer.strip().strip("$").strip().removesuffix(".")
    answer = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", answer)
    answer = re.sub(r"\s+", " ", answer).strip()
    return re.sub(r",(?:\\!)?", "", answer) if _THOUSANDS.fullmatch(answer) else answer


def _math_equal(given: str, truth: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify  # a second to import: only when an answer needs it

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn at every call that their limits are off
    latex_only = [LatexExtractionConfig()]
    # The library's own limits are alarms of the main thread, which swallow a time-out as "wrong": switched off here,
    # the pool's wall clock is the limit.
    truth_parsed = parse(f"${truth}$", extraction_config=latex_only, parsing_timeout=None)
    given_parsed = parse(f"${given}$", extraction_config=latex_only, parsing_timeout=None)
    return bool(verify(truth_parsed, given_parsed, timeout_seconds=None))
