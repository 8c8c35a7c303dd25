"""Grading answers outside the driver."""

from verl.utils.reward_score.default import default_compute_score

__all__ = ["default_compute_score"]
