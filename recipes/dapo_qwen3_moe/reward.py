"""Rule reward of DAPO: 1 when the last ``Answer:`` line of a response is the answer, else -1.

Upstream's grader of this data does the work (``verl.utils.reward_score.math_dapo``): the last 300 characters count, and
both answers are compared as texts in Minerva's normal form.
"""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score import math_dapo

NO_ANSWER = math_dapo.normalize_final_answer("[INVALID]")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """``score`` (verl's signature), ``acc``, and ``answered``: there was an answer to judge."""
    graded = math_dapo.compute_score(solution_str, str(ground_truth))
    return {"score": graded["score"], "acc": float(graded["acc"]), "answered": float(graded["pred"] != NO_ANSWER)}
