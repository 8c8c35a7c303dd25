"""Rule reward of MATH-lighteval: 1 when what the last ``\\boxed{}`` of a response holds is the answer, else 0.

Difference from verl's ``reward_score/math.py``, which serves this data source upstream: equal numbers and expressions
count, not only texts that become equal by string rules. Like every reward here it has no time limit of its own: the
reward pool ends what takes too long.
"""

from __future__ import annotations

from typing import Any

from recipes.common.math_answers import answers_equal, last_boxed


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """``score`` (verl's signature), which is ``accuracy``; ``boxed`` says whether there was an answer to judge."""
    boxed = last_boxed(solution_str)
    accuracy = float(boxed is not None and answers_equal(boxed, str(ground_truth)))
    return {"score": accuracy, "accuracy": accuracy, "boxed": float(boxed is not None)}
