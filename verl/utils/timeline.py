"""The timeline of one process: named spans and the clock that they are measured with."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import record_function

MAX_SPANS = 20_000  # per recording; a step has some dozens


@dataclass(frozen=True)
class Span:
    """A named interval from ``start_s`` to ``end_s`` on this process's clock."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class ClockReading:
    """A reading ``clock_s`` of the clock named ``clock``, which all processes of a running kernel share."""

    clock: str
    clock_s: float


@dataclass(frozen=True)
class Recording:
    """The spans of a process since its recording started; ``num_dropped`` came when it was full."""

    host: str
    pid: int
    spans: list[Span]
    num_dropped: int
    reading: ClockReading


class Timeline:
    """Spans of this process, stored only between ``begin`` and ``take``; otherwise a span costs a microsecond."""

    def __init__(self, max_spans: int = MAX_SPANS) -> None:
        self._max_spans = max_spans
        self._spans: list[Span] | None = None
        self._num_dropped = 0

    def begin(self) -> ClockReading:
        """Starts a recording and discards an unfinished one."""
        self._spans, self._num_dropped = [], 0
        return read_clock()

    def take(self) -> Recording:
        spans, self._spans = self._spans or [], None
        return Recording(socket.gethostname(), os.getpid(), spans, self._num_dropped, read_clock())

    def add(self, name: str, start_s: float, end_s: float) -> None:
        """Adds a span that was measured elsewhere with ``now_s``."""
        if self._spans is None:
            return
        if len(self._spans) < self._max_spans:
            self._spans.append(Span(name, start_s, end_s))
        else:
            self._num_dropped += 1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Makes everything inside one span, also when it raises; torch's profiler shows a range of its name."""
        with record_function(name):
            start_s = now_s()
            try:
                yield
            finally:
                self.add(name, start_s, now_s())


def now_s() -> float:
    """CLOCK_MONOTONIC, which starts with the kernel and is the same in all its processes."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def read_clock() -> ClockReading:
    """Reads the clock; its name is the boot and the time namespace, in which a container may have an offset."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/time")  # kernels before 5.6 have none
    return ClockReading(f"{boot} {os.readlink(namespace) if namespace.exists() else ''}", now_s())
