"""Spans of one process, clocks of several hosts, and the trace that is made of both."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.single_controller.base import Worker
from verl.trainer.config import load_config, validate_config
from verl.trainer.ppo.metric_utils import marked_timer
from verl.trainer.ppo.step_timeline import BoundedReading, StepTimeline, clock_offsets
from verl.utils.timeline import ClockReading, Recording, Timeline, now_s, read_clock


class Ranks:
    """Workers without a launcher: each call goes to all of them, as a worker group's does."""

    def __init__(self, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers = []
        for rank in range(world_size):
            for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", rank)):
                monkeypatch.setenv(name, str(value))
            self.workers.append(Worker())

    def begin_timeline(self) -> list[ClockReading]:
        return [worker.begin_timeline() for worker in self.workers]

    def read_clock(self) -> list[ClockReading]:
        return [worker.read_clock() for worker in self.workers]

    def take_timeline(self) -> list[Recording]:
        return [worker.take_timeline() for worker in self.workers]


def test_nothing_is_kept_outside_of_a_recording_and_no_more_than_the_limit_inside() -> None:
    timeline = Timeline(max_spans=3)
    with timeline.span("before"):
        pass
    assert timeline.take().spans == []
    timeline.begin()
    with pytest.raises(KeyError), timeline.span("outer"), timeline.span("inner"):
        raise KeyError
    assert [span.name for span in timeline.take().spans] == ["inner", "outer"]
    timeline.begin()
    for number in range(5):
        timeline.add(str(number), 0.0, 1.0)
    recording = timeline.take()
    assert [span.name for span in recording.spans] == ["0", "1", "2"] and recording.num_dropped == 2


def test_clocks_of_other_hosts_are_found_within_the_error_that_is_told() -> None:
    chance = random.Random(3)
    true_offset_s = {"a": 1234.5, "b": -987654.25}
    readings, now = [], 100.0
    for clock in ("a", "b", "a", "a", "b", "b"):
        there_s, back_s = chance.uniform(0.0001, 0.02), chance.uniform(0.0001, 0.02)
        reading = ClockReading(clock, now + there_s - true_offset_s[clock])
        readings.append(BoundedReading(reading, now, now + there_s + back_s))
        now += 1.0
    offsets = clock_offsets(readings)
    for clock, true_s in true_offset_s.items():
        widths = [r.before_s - r.after_s for r in readings if r.reading.clock == clock]
        assert abs(offsets[clock].offset_s - true_s) <= offsets[clock].error_s + 1e-9
        assert 0 < offsets[clock].error_s <= min(widths) / 2 + 1e-9
    own = offsets[read_clock().clock]
    assert own.offset_s == own.error_s == 0.0


def _overlaps(events: list[dict]) -> Iterator[tuple[str, str]]:
    """Pairs of one process that neither nest nor follow each other."""
    for process in {event["pid"] for event in events}:
        spans = sorted((e["ts"], -e["dur"], e["name"]) for e in events if e["pid"] == process)
        open_until: list[tuple[float, str]] = []
        for start, minus_duration, name in spans:
            while open_until and open_until[-1][0] <= start:
                open_until.pop()
            if open_until and start - minus_duration > open_until[-1][0]:
                yield open_until[-1][1], name
            open_until.append((start - minus_duration, name))


def test_the_trace_has_every_rank_and_its_phases_nest_and_last_as_long_as_the_metrics_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(3, monkeypatch)
    timeline = StepTimeline(str(tmp_path), freq=2, groups=[ranks])
    for step in (1, 2, 3, 4):
        timeline.before_step(step)
        timing = timeline.phase_seconds()
        with marked_timer("step", timing):
            for _ in range(2):
                with marked_timer("gen", timing):
                    for worker in ranks.workers:
                        with worker.timeline.span("generate_sequences"), worker.timeline.span("weight_sync"):
                            now_s()
        timeline.after_step(step)
        if step == 2:
            expected = timing
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == ["step_2.json", "step_4.json"]
    trace = json.loads((tmp_path / "timeline" / "step_2.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert [names[pid].split(" (")[0] for pid in sorted(names)] == ["controller", "rank 0", "rank 1", "rank 2"]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert list(_overlaps(spans)) == []
    for phase in ("step", "gen"):
        seconds = sum(span["dur"] for span in spans if span["pid"] == 0 and span["name"] == phase) / 1e6
        assert seconds == pytest.approx(expected[phase], abs=1e-6)
    (step,) = (span for span in spans if span["name"] == "step")
    assert 0 <= step["ts"] < 1e6
    for pid in (1, 2, 3):
        mine = [span for span in spans if span["pid"] == pid]
        assert [span["name"] for span in mine] == ["generate_sequences", "weight_sync"] * 2
        assert all(step["ts"] <= s["ts"] and s["ts"] + s["dur"] <= step["ts"] + step["dur"] for s in mine)
    assert trace["otherData"] == {"step": 2, "clock_error_us": 0.0, "num_dropped_spans": 0}
    timeline.cut_back(3)
    assert [path.name for path in (tmp_path / "timeline").iterdir()] == ["step_2.json"]


def test_the_check_for_overlaps_finds_one() -> None:
    event = {"pid": 1, "name": "x"}
    assert list(_overlaps([{**event, "ts": 0, "dur": 2}, {**event, "ts": 1, "dur": 2}])) == [("x", "x")]


def test_a_frequency_of_zero_is_a_problem() -> None:
    found = validate_config(load_config(["trainer.timeline_freq=0"]))
    assert any("trainer.timeline_freq is 0; use -1 for never" in problem for problem in found)
