"""A step as a Chrome trace: the phases of the controller and of every rank on one clock.

Files are ``timeline/step_N.json``, for chrome://tracing and https://ui.perfetto.dev. Format: "Trace Event Format"
(JSON object, complete events ``X`` with ``ts`` and ``dur`` in microseconds, metadata events ``M``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.trainer.ppo.metric_utils import PhaseSeconds
from verl.trainer.ppo.observers import StepFiles
from verl.utils.timeline import ClockReading, Recording, Span, Timeline, now_s, read_clock

FOLDER = "timeline"
_EXTRA_READINGS = 3  # each limits the error of the other hosts' clocks to its own round trip


@dataclass(frozen=True)
class BoundedReading:
    """A reading of a rank's clock, taken between two times of the controller's clock."""

    reading: ClockReading
    after_s: float
    before_s: float


@dataclass(frozen=True)
class ClockOffset:
    """The offset to add to a clock to get the controller's, and the largest error of that offset."""

    offset_s: float
    error_s: float


class StepTimeline(StepFiles):
    """Records the steps that ``trainer.timeline_freq`` divides; the others cost a microsecond a phase.

    Args:
        report_dir: where the run writes.
        freq: a file every so many steps; -1 is none.
        groups: the worker groups whose ranks are in the trace.
    """

    def __init__(self, report_dir: str, freq: int, groups: Sequence[Any]) -> None:
        super().__init__(Path(report_dir) / FOLDER, "step_*.json")
        self._freq, self._groups = freq, groups
        self._controller = Timeline()
        self._step: int | None = None
        self._start_s = 0.0
        self._readings: list[BoundedReading] = []

    def phase_seconds(self) -> PhaseSeconds:
        """A dict for ``marked_timer``, whose phases are the controller's spans."""
        return PhaseSeconds(self._controller)

    def before_step(self, number: int) -> None:
        if self._freq < 1 or number % self._freq:
            return
        self._step, self._readings = number, []
        self._start_s = now_s()
        self._controller.begin()
        for group in self._groups:
            self._note(self._start_s, group.begin_timeline())

    def after_step(self, number: int) -> None:
        if self._step is None:
            return
        for _ in range(_EXTRA_READINGS):
            asked_s = now_s()
            for group in self._groups:
                self._note(asked_s, group.read_clock())
        recordings: list[Recording] = []
        for group in self._groups:
            asked_s = now_s()
            recordings += (of_group := group.take_timeline())
            self._note(asked_s, [recording.reading for recording in of_group])
        text = json.dumps(
            trace(self._step, self._start_s, self._controller.take(), recordings, clock_offsets(self._readings))
        )
        self.write_file(f"step_{self._step}.json", text + "\n")
        self._step = None

    def _note(self, asked_s: float, readings: Iterable[ClockReading]) -> None:
        answered_s = now_s()
        self._readings += [BoundedReading(reading, asked_s, answered_s) for reading in readings]


def clock_offsets(readings: Sequence[BoundedReading]) -> dict[str, ClockOffset]:
    """Returns for each clock the middle of the offsets that its readings allow; 0 for the controller's own.

    A clock that read w between the controller's times a and b is late by at least a - w and at most b - w.
    """
    own = read_clock().clock
    offsets = {own: ClockOffset(0.0, 0.0)}
    for clock in {bounded.reading.clock for bounded in readings} - {own}:
        same = [bounded for bounded in readings if bounded.reading.clock == clock]
        least = max(bounded.after_s - bounded.reading.clock_s for bounded in same)
        most = min(bounded.before_s - bounded.reading.clock_s for bounded in same)
        offsets[clock] = ClockOffset((least + most) / 2, abs(most - least) / 2)
    return offsets


def trace(
    step: int, start_s: float, controller: Recording, ranks: Sequence[Recording], offsets: dict[str, ClockOffset]
) -> dict[str, Any]:
    """Returns the trace of one step: process 0 is the controller, process r + 1 is rank r; time 0 is its start."""
    events: list[dict[str, Any]] = []
    for process, recording in enumerate([controller, *ranks]):
        name = "controller" if process == 0 else f"rank {process - 1}"
        offset_s = offsets[recording.reading.clock].offset_s - start_s
        events += [
            _named("process_name", process, {"name": f"{name} ({recording.host}, pid {recording.pid})"}),
            _named("process_sort_index", process, {"sort_index": process}),
            *(_event(span, process, offset_s) for span in sorted(recording.spans, key=_outermost_first)),
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step": step,
            "clock_error_us": round(max(offset.error_s for offset in offsets.values()) * 1e6, 1),
            "num_dropped_spans": sum(recording.num_dropped for recording in [controller, *ranks]),
        },
    }


def _outermost_first(span: Span) -> tuple[float, float]:
    return span.start_s, -span.end_s


def _event(span: Span, process: int, offset_s: float) -> dict[str, Any]:
    # Round both ends and never the duration, so that a span stays inside the one around it.
    start_ns, end_ns = (round((moment_s + offset_s) * 1e9) for moment_s in (span.start_s, span.end_s))
    timing = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"name": span.name, "ph": "X", "pid": process, "tid": 0, **timing}


def _named(kind: str, process: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": 0, "args": values}
