"""For plug-ins alone: the decorator of calls in tools and agent loops (upstream: ``verl.utils.rollout_trace``)."""

from __future__ import annotations

from typing import TypeVar

Call = TypeVar("Call")


def rollout_trace_op(func: Call) -> Call:
    """``func`` itself: metrics, and ``trainer.save_rollouts``, show what came of the calls."""
    return func
