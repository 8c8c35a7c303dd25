"""A watchdog that notices a hanging phase and collects where every rank is in one report file.

Ranks communicate through a directory that all of them see (for example the one of the checkpoints), not through
collectives, which are what hangs. Each rank has a thread that checks every ``timeout_s / 20`` whether the thread
in the phase still moves, answers when a rank has raised the alarm, and regularly writes a sign of life.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_formats.files import write_text
from verl.utils.hang_report import Answer, launched, own_answer, report

logger = logging.getLogger(__name__)

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 15.0


@dataclass(frozen=True)
class _Phase:
    name: str
    thread_id: int
    serial: int


class HangWatchdog:
    """Watches one rank: ``with watchdog.phase("update_actor"): ...`` surrounds what must keep moving.

    A phase hangs when for ``timeout_s`` its thread has stayed in the same calls, no collective was launched and
    ``progress`` was not called: a phase may take any time while something moves. The watchdog then writes one file
    ``hang-<time>-rank<N>.txt`` to ``directory`` (``last_report``). The job keeps waiting until the process groups' own
    timeout ends it. Nothing is watched outside of phases.

    Args:
        directory: shared by all ranks and used by no other run.
        config: text that is copied into the report.
        groups: the process groups whose collectives are counted (``group_list``).
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
        self._is_reported = False
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
        """Report that something has moved; for loops that stay in one call for a long time."""
        self._num_progress += 1

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        self._metrics = dict(metrics)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2 * MAX_INTERVAL_S)

    @property
    def _alive_dir(self) -> Path:
        return self.directory / "alive"

    @property
    def _alarm(self) -> Path:
        return self.directory / "alarm.json"

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._look()
            except Exception:  # the edge of a thread: a look that fails must not be the last one
                logger.exception("rank %d: the hang watchdog failed with files in %s", self.rank, self.directory)

    def _look(self) -> None:
        stuck_s = self._measure()
        self._show_life()
        alarm = _read_json(self._alarm)
        if alarm is not None:
            if alarm["id"] != self._answered:
                self._answer(alarm["id"], stuck_s)
        elif stuck_s > self.timeout_s and not self._is_reported:
            alarm_id = f"{time.time_ns()}-{self.rank}"
            try:
                descriptor = os.open(self._alarm, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return  # another rank was faster; the next check sees its alarm
            with os.fdopen(descriptor, "w") as file:
                json.dump({"id": alarm_id, "rank": self.rank}, file)
            self._answer(alarm_id, stuck_s)
            self._collect(alarm_id)

    def _show_life(self) -> None:
        sign = (self._phase_name(), time.monotonic() // (self.timeout_s / 5))
        if sign != self._shown:
            write_text(
                self._alive_dir / f"rank-{self.rank}.json",
                json.dumps({"phase": sign[0], "time": time.time()}),
                is_durable=False,
            )
            self._shown = sign

    def _measure(self) -> float:
        """Return the seconds for which nothing has moved, 0 outside of a phase."""
        phase = self._phases[-1] if self._phases else None
        seen = None
        if phase is not None:
            frame = sys._current_frames().get(phase.thread_id)
            calls = []
            while frame is not None:
                calls.append((id(frame), frame.f_lasti))
                frame = frame.f_back
            # Frames at the same positions may belong to new calls; then the counts of collectives or progress differ.
            counts = [count for _, count in launched(self._groups)]
            seen = (phase.serial, self._num_progress, calls, counts)
        now = time.monotonic()
        # Limit a gap in which this thread did not run either (a stopped process, an overloaded machine).
        self._stuck_s += min(now - self._looked_at, 4 * self._interval_s)
        self._looked_at = now
        if seen is None or seen != self._seen:
            self._seen, self._stuck_s, self._is_reported = seen, 0.0, False
        return self._stuck_s

    def _phase_name(self) -> str:
        return "/".join(phase.name for phase in list(self._phases))

    def _answer(self, alarm_id: str, stuck_s: float) -> None:
        phases = list(self._phases)
        thread_id = phases[-1].thread_id if phases else None
        answer = own_answer(self.rank, self._phase_name(), stuck_s, thread_id, self._groups, self._metrics)
        folder = self.directory / f"answers-{alarm_id}"
        folder.mkdir(exist_ok=True)
        write_text(folder / f"rank-{self.rank}.json", json.dumps(asdict(answer)), is_durable=False)
        self._answered, self._is_reported = alarm_id, True

    def _collect(self, alarm_id: str) -> None:
        """Wait for the other ranks' answers, for a few intervals at most, and write the report."""
        folder = self.directory / f"answers-{alarm_id}"
        deadline = time.monotonic() + max(2.0, 4 * self._interval_s)
        while len(list(folder.glob("rank-*.json"))) < self.world_size and time.monotonic() < deadline:
            time.sleep(self._interval_s / 4)
        found = [_read_json(path) for path in folder.glob("rank-*.json")]
        answers = sorted((Answer(**values) for values in found if values), key=lambda answer: answer.rank)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        text = report(answers, self.world_size, self._last_seen(), self.rank, self._config, now)
        path = self.directory / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-rank{self.rank}.txt"
        write_text(path, text)
        self.last_report = path
        logger.error("%s; the full report is in %s", text.splitlines()[0], path)
        self._alarm.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # a late answer may still be written into it

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
    """Return the process groups among the fields of ``ProcessGroups`` that have more than one rank."""
    found = [value for value in vars(groups).values() if isinstance(value, dist.ProcessGroup)]
    return [group for group in found if group.size() > 1]


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the content, or None when there is no file or its writer has not finished."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return values
