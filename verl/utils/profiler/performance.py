"""For plug-ins alone: seconds of a block (upstream: ``verl.utils.profiler.performance``)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds of the block to ``timing_raw[name]``."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start_s
