"""Rule reward of R1-Zero: 0.33 for the format, 0.67 for the right answer, with its parts reported separately.

Differences from verl's ``recipe/r1_ascend/deepscaler.py``, each where that one can be fooled:

- Format: every tag occurs exactly once, nothing but white space stands before ``<think>``, between ``</think>`` and
  ``<answer>``, or after ``</answer>``, and neither the thought nor the box is empty. Upstream takes repeated tags,
  text anywhere, and empty parts. Where the chat template ends with ``<think>``, that tag is the prompt's and the
  response has none (``verl.utils.reward_score.thoughts``).
- Answer: with a right format it is the last ``\\boxed{}`` of the answer part, so a box in the thought earns nothing.
  Without it, the last box anywhere, as upstream. Missing and unclosed boxes earn nothing.
- Grading: by ``recipes.common.math_answers``, which has no ``eval``. Upstream's grader hands model text to
  ``sympy.parse_expr``, which is one.

This module has no time limit of its own: call it in the reward pool's processes
(``verl.utils.reward_score.scoring_pool``), which are ended at a wall-clock limit and count the answer as ungraded.
"""

from __future__ import annotations

import re
from typing import Any

from recipes.common.math_answers import answers_equal, last_boxed
from verl.utils.reward_score.thoughts import with_opened_thought

FORMAT_WEIGHT = 0.33
ACCURACY_WEIGHT = 0.67
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

_FORM = re.compile(r"<think>(?P<think>.*)</think>\s*<answer>(?P<answer>.*)</answer>", re.DOTALL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """Score one response: ``score = 0.33 * format + 0.67 * accuracy``, both parts 0.0 or 1.0 (verl's signature)."""
    answer_part = well_formed_answer(with_opened_thought(solution_str, extra_info))
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
