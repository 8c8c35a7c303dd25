"""Rule reward of DAPO: 1 when the last ``Answer:`` line of a response is the answer, else -1.

Upstream's grader of this data reads the answer (``verl.utils.reward_score.math_dapo``): the last 300 characters count,
and both answers are compared as texts in Minerva's normal form. Its answers are integers, so that this form may drop
units; other answers are right too when they are equal as mathematics, and wrong when units, bases or numbers differ.
"""

from __future__ import annotations

import re
from typing import Any

from recipes.common.math_answers import answers_equal, contradict
from verl.utils.reward_score import math_dapo

_LOOKED_AT = 300  # characters at the end of a response, as upstream
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
NO_ANSWER = math_dapo.normalize_final_answer("[INVALID]")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """``score`` (verl's signature), ``acc``, and ``answered``: there was an answer to judge."""
    truth = str(ground_truth)
    graded = math_dapo.compute_score(solution_str, truth)
    given = (_ANSWER.findall(solution_str[-_LOOKED_AT:]) or [""])[-1].strip()
    is_right = answers_equal(given, truth) or (graded["acc"] and not contradict(given, truth))
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right), "answered": float(graded["pred"] != NO_ANSWER)}
