"""Rule reward of GSM8K: 0.9 for exactly the right answer after ``####``, and 0.1 for a response in the form asked for.

The form is a last line ``#### n`` and no other ``####``, after at most one thought ``<think>...</think>``. The opening
tag is the prompt's where the chat template ends with it (``verl.utils.reward_score.thoughts``), and may be missing
where nobody says how the prompt ended. An answer inside a thought, or after one that never ends, is none. The tags are
texts here, whether the tokenizer has one token for them or several.
"""

from __future__ import annotations

import re
from typing import Any

from recipes.common.answer_forms import ascii_form
from recipes.common.math_answers import answers_equal
from verl.utils.reward_score.thoughts import CLOSE, OPEN, last_tag, with_opened_thought

MARK = "####"
FORMAT_SCORE = 0.1
_EMPHASIS = re.compile(r"(?:[ *_`$]|\\\(|\\\$|\\boxed\{)+")  # before the number; what is behind it does not matter
_NUMBER = re.compile(r"-?(?:\\?\$)?\d(?:[\d,]|\\,|\{,\})*(?:\.\d+)?")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """``score`` (verl's signature) with its parts ``accuracy`` and ``format``."""
    whole = with_opened_thought(solution_str, extra_info)
    answered = after_thought(whole)
    given = final_answer(answered)
    accuracy = float(given is not None and answers_equal(re.sub(r"\\?\$", "", given), str(ground_truth)))
    last = answered.rstrip().rpartition("\n")[2]
    has_form = answered.count(MARK) == 1 and last.startswith(MARK) and given == last.removeprefix(MARK).strip()
    is_formed = float(
        given is not None and has_form and _one_thought_at_most(whole, may_lack_open=last_tag(extra_info) is None)
    )
    score = (1 - FORMAT_SCORE) * accuracy + FORMAT_SCORE * is_formed
    return {"score": score, "accuracy": accuracy, "format": is_formed}


def after_thought(text: str) -> str:
    """What follows the last thought; empty where a thought never ends."""
    rest = text.rpartition(CLOSE)[2]
    return "" if OPEN in rest else rest


def final_answer(text: str) -> str | None:
    """The number that follows the last ``####``; None without one."""
    if MARK not in text:
        return None
    last = ascii_form(text.rpartition(MARK)[2].lstrip(" "))
    emphasis = _EMPHASIS.match(last)
    number = _NUMBER.match(last, emphasis.end() if emphasis and not _NUMBER.match(last) else 0)
    return None if number is None else number[0]


def _one_thought_at_most(text: str, *, may_lack_open: bool) -> bool:
    opened, closed = text.count(OPEN), text.count(CLOSE)
    is_paired = opened <= closed if may_lack_open else opened == closed
    return closed <= 1 and is_paired and (not opened or text.lstrip().startswith(OPEN))
