"""The grader of MATH for lists of answers (upstream: ``verl.utils.reward_score.math_batch``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.reward_score.math_reward import compute_score


def compute_score_batched(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[str], extra_infos: Sequence[Any]
) -> list[float]:
    """The score of each answer; the sources and what else is known of the rows do not matter."""
    return [compute_score(answer, truth) for answer, truth in zip(solution_strs, ground_truths, strict=True)]
