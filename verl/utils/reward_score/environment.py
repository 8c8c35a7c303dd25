"""The reward function of samples whose environment gives all rewards."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """0, to which the run adds the rewards of the sample's turns."""
    return 0.0
