"""Rule reward in DeepScaleR's form: 1 when the box after the end of the thought holds the answer, else 0.

A response without ``</think>`` earns nothing, unless the chat template has closed the thought in the prompt
(``verl.utils.reward_score.thoughts``). A box in a thought earns nothing either. Answers are equal as number, text or
expression (``recipes.common.math_answers``). Like every reward here it has no time limit of its own: the reward pool
ends what takes too long.
"""

from __future__ import annotations

from typing import Any

from recipes.common.math_answers import answers_equal, last_boxed
from verl.utils.reward_score.thoughts import CLOSE, OPEN, last_tag


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """``score`` (verl's signature), which is ``accuracy``; ``format``: the thought ended and a box follows."""
    _, end, answer = solution_str.rpartition(CLOSE)
    has_ended = bool(end or last_tag(extra_info) == CLOSE) and OPEN not in answer
    boxed = last_boxed(answer) if has_ended else None
    accuracy = float(boxed is not None and answers_equal(boxed, str(ground_truth)))
    return {"score": accuracy, "accuracy": accuracy, "format": float(boxed is not None)}
