"""A reward function that does what the answer tells it to: for tests of the scoring pool only."""

from __future__ import annotations

import os
import time
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], bonus: float = 0.0
) -> dict[str, float] | float:
    """Misbehave as asked, or compare with the ground truth."""
    if solution_str == "sleep":
        time.sleep(600)
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "die":
        os._exit(1)
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "print":
        print("x" * 5_000_000)
    if solution_str == "memory":
        return float(len(bytearray(1 << 40)))
    if solution_str == "float":
        return 0.25
    if solution_str == "pid":
        return float(os.getpid())
    accuracy = float(solution_str == ground_truth)
    return {"score": accuracy + bonus, "accuracy": accuracy}
