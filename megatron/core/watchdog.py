"""Notices that a phase hangs and has all ranks say where they are, in one file.

Ranks meet in a directory that all of them see (where checkpoints are, say), not in collectives: those are what hangs.
Each has a thread that every ``timeout_s / 20`` looks whether the thread in the phase still moves, answers when some
rank has raised the alarm, and now and then writes a sign of life.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.hang_report import Answer, launched, own_answer, report

logger = logging.getLogger(__name__)

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 15.0


@dataclass(frozen=True)
class _Phase:
    name: str
    thread_id: int
    serial: int


class HangWatchdog:
    """Watches one rank; ``with watchdog.phase("update_actor"): ...`` around what may not stand still.

    A phase hangs when for ``timeout_s`` its thread has stayed in the same calls, no collective was launched and
    ``progress`` was not called: a phase may take as long as it likes while something moves. Then one file
    ``hang-<time>-rank<N>.txt`` appears in ``directory`` (``last_report``), the job goes on waiting, and the process
    groups' own timeout ends it. Outside of phases nothing is watched.

    Args:
        directory: shared by all ranks and used by no other run.
        config: goes into the report as it is.
        groups: process groups whose collectives are counted (``group_list``).
    """

    def __init__(
        self,
        directory: str | Path,
        rank: int,
        world_size: int,
        timeout_s: float,
        *,
        config: str = "",
        groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be above 0 (make no watchdog to watch nothing)")
        self.directory = Path(directory)
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.last_report: Path | None = None
        self._config, self._groups = config, groups
        self._interval_s = min(max(timeout_s / 20, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self._metrics: dict[str, float] = {}
        self._phases: list[_Phase] = []
        self._num_phases = self._num_progress = 0
        self._seen: Any = None
        self._stuck_s, self._looked_at = 0.0, time.monotonic()
        self._answered: str | None = None
        self._told = False
        self._shown: tuple[str, float] | None = None
        self._closed = threading.Event()
        self._alive_dir.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._watch, name="hang-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch the calling thread; phases nest, and the innermost one names the hang."""
        self._num_phases += 1
        self._phases.append(_Phase(name, threading.get_ident(), self._num_phases))
        try:
            yield
        finally:
            self._phases.pop()
            self._num_progress += 1

    def progress(self) -> None:
        """Say that something has moved: for loops that stay in one call for long."""
        self._num_progress += 1

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Remember the last metrics for the report."""
        self._metrics = dict(metrics)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(2 * MAX_INTERVAL_S)

    @property
    def _alive_dir(self) -> Path:
        return self.directory / "alive"

    @property
    def _alarm(self) -> Path:
        return self.directory / "alarm.json"

    def _watch(self) -> None:
        """Consumes the time; ended by ``close``."""
        while not self._closed.wait(self._interval_s):
            try:
                self._look()
            except OSError:
                logger.exception("rank %d: the hang watchdog cannot use %s", self.rank, self.directory)

    def _look(self) -> None:
        stuck_s = self._measure()
        self._show_life()
        alarm = _read_json(self._alarm)
        if alarm is not None:
            if alarm["id"] != self._answered:
                self._answer(alarm["id"], stuck_s)
        elif stuck_s > self.timeout_s and not self._told:
            alarm_id = f"{time.time_ns()}-{self.rank}"
            try:
                descriptor = os.open(self._alarm, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return  # another rank was faster; its alarm is seen the next time
            with os.fdopen(descriptor, "w") as file:
                json.dump({"id": alarm_id, "rank": self.rank}, file)
            self._answer(alarm_id, stuck_s)
            self._collect(alarm_id)

    def _show_life(self) -> None:
        sign = (self._phase_name(), time.monotonic() // (self.timeout_s / 5))
        if sign != self._shown:
            _write_json(self._alive_dir / f"rank-{self.rank}.json", {"phase": sign[0], "time": time.time()})
            self._shown = sign

    def _measure(self) -> float:
        """Seconds for which nothing has moved, 0 outside of a phase."""
        phase = self._phases[-1] if self._phases else None
        seen = None
        if phase is not None:
            frame = sys._current_frames().get(phase.thread_id)
            calls = []
            while frame is not None:
                calls.append((id(frame), frame.f_lasti))
                frame = frame.f_back
            # The same calls at the same places may be new ones; then collectives or progress have been counted.
            counts = [count for _, count in launched(self._groups)]
            seen = (phase.serial, self._num_progress, calls, counts)
        now = time.monotonic()
        # A gap in which this thread did not run either (a stopped process, a crowded machine) hardly counts.
        self._stuck_s += min(now - self._looked_at, 4 * self._interval_s)
        self._looked_at = now
        if seen is None or seen != self._seen:
            self._seen, self._stuck_s, self._told = seen, 0.0, False
        return self._stuck_s

    def _phase_name(self) -> str:
        return "/".join(phase.name for phase in list(self._phases))

    def _answer(self, alarm_id: str, stuck_s: float) -> None:
        phases = list(self._phases)
        thread_id = phases[-1].thread_id if phases else None
        answer = own_answer(self.rank, self._phase_name(), stuck_s, thread_id, self._groups, self._metrics)
        folder = self.directory / f"answers-{alarm_id}"
        folder.mkdir(exist_ok=True)
        _write_json(folder / f"rank-{self.rank}.json", answer.to_json())
        self._answered, self._told = alarm_id, True

    def _collect(self, alarm_id: str) -> None:
        """Wait for the answers, at most a few rounds of the slowest rank, and write the report."""
        folder = self.directory / f"answers-{alarm_id}"
        deadline = time.monotonic() + max(2.0, 4 * self._interval_s)
        while len(list(folder.glob("rank-*.json"))) < self.world_size and time.monotonic() < deadline:
            time.sleep(self._interval_s / 4)
        found = [_read_json(path) for path in folder.glob("rank-*.json")]
        answers = sorted((Answer.from_json(values) for values in found if values), key=lambda answer: answer.rank)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        text = report(answers, self.world_size, self._last_seen(), self.rank, self._config, now)
        path = self.directory / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-rank{self.rank}.txt"
        _write(path, text)
        self.last_report = path
        logger.error("%s; all of it is in %s", text.splitlines()[0], path)
        self._alarm.unlink()
        shutil.rmtree(folder, ignore_errors=True)  # a late answer may be on its way into it

    def _last_seen(self) -> dict[int, str]:
        seen = {}
        for path in self._alive_dir.glob("rank-*.json"):
            values = _read_json(path)
            if values is not None:
                age_s = time.time() - values["time"]
                where = f"in phase {values['phase']}" if values["phase"] else "in no phase"
                seen[int(path.stem.removeprefix("rank-"))] = f"last sign of life {age_s:.0f} s ago {where}"
        return seen


def group_list(groups: object) -> list[dist.ProcessGroup]:
    """The process groups among the fields of ``ProcessGroups``, those of one rank left out."""
    found = [value for value in vars(groups).values() if isinstance(value, dist.ProcessGroup)]
    return [group for group in found if group.size() > 1]


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    _write(path, json.dumps(values))


def _write(path: Path, text: str) -> None:
    """All or nothing; no fsync, because only processes that are alive read it soon."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(text)
    os.replace(tmp, path)


def _read_json(path: Path) -> dict[str, Any] | None:
    """None when there is no file, or when its writer has not written it yet."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return values
