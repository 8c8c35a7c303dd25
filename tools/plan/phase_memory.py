"""Bytes on the device before, during and after every phase of a worker's timeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tools.plan.device import MemoryMeter
from verl.utils.timeline import Timeline


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on the device when phase ``name`` starts, at most during it, and when it ends."""

    name: str
    before_bytes: int
    peak_bytes: int
    after_bytes: int


class MemoryTimeline(Timeline):
    """A worker's timeline that records bytes instead of seconds; a phase within another one is recorded before it."""

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self.meter = meter
        self.phases: list[PhaseMemory] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """See ``Timeline``."""
        meter = self.meter
        meter.settle()
        before, outer_peak = meter.now_bytes, meter.peak_bytes
        meter.peak_bytes = before
        try:
            yield
        finally:
            meter.settle()
            self.phases.append(PhaseMemory(name, before, meter.peak_bytes, meter.now_bytes))
            meter.peak_bytes = max(outer_peak, meter.peak_bytes)
