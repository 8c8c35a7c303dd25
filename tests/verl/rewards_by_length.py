"""A reward function that grades any text, so that a model with random weights has something to learn."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return the remainder of the text's length by 7, as a share of 7."""
    return len(solution_str) % 7 / 7
