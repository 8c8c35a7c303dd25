"""Seconds of a pipeline of stages that take different times."""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_seconds(stages: Sequence[float], num_microbatches: float, num_chunks: int = 1) -> float:
    """From the first forward to the last backward of ``num_microbatches``, each taking ``stages[s]`` on stage s.

    The slowest stage never waits between its start and its end: M max(t). The others' time passes before and
    after: sum(t) - max(t), and a chunk's share of it when the stages' layers are cut into ``num_chunks`` (interleaved).
    Exact for 1F1B and for forward-only passes when the stages are equal; a lower bound otherwise.
    """
    slowest = max(stages)
    return num_microbatches * slowest + (sum(stages) - slowest) / num_chunks
