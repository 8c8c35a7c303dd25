"""Rule reward: 1 for exactly the right answer after ``####``, less a price for every call of a tool.

The kind of a problem is no part of the score. It only tells apart the shares of problems on which a tool is called.
"""

from __future__ import annotations

from typing import Any

MARK = "####"
PRICE = 0.2


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """``score`` (verl's signature) with ``accuracy``, ``calls`` and, for the problem's kind, ``tool_on_<kind>``."""
    info = extra_info or {}
    calls = float(info.get("tool_calls", 0.0))
    accuracy = float(solution_str.rpartition(MARK)[2].strip() == str(ground_truth) and MARK in solution_str)
    kind = {f"tool_on_{info['kind']}": float(calls > 0)} if info.get("kind") else {}
    return {"score": accuracy - PRICE * calls, "accuracy": accuracy, "calls": calls, **kind}
