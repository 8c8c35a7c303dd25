"""What torch's CPU allocator gave out and did not get back, as its own reports say."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Result = TypeVar("Result")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read once, and a later test may ask that a recording prints nothing


def net_allocated(*works: Callable[[], Result]) -> list[tuple[Result, int]]:
    """Result of each of ``works``, and how many bytes of tensor memory are more in use after it than before.

    Counts what this thread allocates and frees, so not what communication threads let go.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        gc.collect()
        results = [_marked(work, index) for index, work in enumerate(works)]
    assert watched.profiler is not None
    assert watched.profiler.kineto_results is not None
    events = watched.profiler.kineto_results.events()
    spans = {event.name(): (event.start_ns(), event.end_ns()) for event in events if event.name().startswith("work ")}
    reports = [event for event in events if event.name() == "[memory]"]
    return [(result, _net(reports, *spans[f"work {index}"])) for index, result in enumerate(results)]


def _marked(work: Callable[[], Result], index: int) -> Result:
    with record_function(f"work {index}"):
        result = work()
        gc.collect(1)  # not all of torch's own objects each time
    return result


def _net(reports: Sequence[torch._C._autograd._KinetoEvent], start_ns: int, end_ns: int) -> int:
    return sum(report.nbytes() for report in reports if start_ns <= report.start_ns() <= end_ns)
