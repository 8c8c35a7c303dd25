"""Scores answers in processes that can be killed, so that no answer text can hang, crash or take over the run."""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

_START_LIMIT_S = 180.0
_CACHE_SIZE = 200_000
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class ScoringJob:
    """One answer to grade; ``extra_info`` must be JSON."""

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the result depends on; the samples of one prompt share their ``extra_info``."""
        return (self.data_source, self.solution_str, self.ground_truth, json.dumps(self.extra_info, sort_keys=True))


@dataclass(frozen=True)
class ScoringResult:
    """``parts`` holds at least ``score``; ``is_graded`` is False when the grader timed out, died or raised."""

    parts: dict[str, float]
    is_graded: bool


UNGRADED = ScoringResult({"score": 0.0}, False)


class ScoringPool:
    """``num_workers`` processes, each answer with a wall-clock limit of its own.

    Args:
        path, name: file and name of ``fn(data_source, solution_str, ground_truth, extra_info, **kwargs)`` that returns
            a float or a dict of floats with ``score``.
        timeout_s: seconds one answer may take; then its process is killed and replaced and the answer is ungraded.
    """

    def __init__(
        self, path: str, name: str, *, kwargs: dict[str, Any] | None = None, num_workers: int, timeout_s: float
    ) -> None:
        self._command = [
            sys.executable,
            "-m",
            "verl.utils.reward_score.scoring_worker",
            path,
            name,
            json.dumps(kwargs or {}),
        ]
        self._timeout_s = timeout_s
        self._closed_read, self._closed_write = os.pipe()  # readable, for every waiting thread, once the pool closes
        self._jobs: queue.Queue[tuple[ScoringJob, Future[ScoringResult]] | None] = queue.Queue()
        self._cache: OrderedDict[tuple[str, str, str, str], Future[ScoringResult]] = OrderedDict()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[ScoringJob]) -> list[Future[ScoringResult]]:
        """One future per job, in order; equal jobs share one."""
        futures = []
        for job in jobs:
            future = self._cache.get(job.key)
            if future is None:
                future = Future()
                self._cache[job.key] = future
                self._jobs.put((job, future))
                if len(self._cache) > _CACHE_SIZE:
                    self._cache.popitem(last=False)
            futures.append(future)
        return futures

    def close(self) -> None:
        """Ends every process at once; answers that are waiting or being graded are cancelled."""
        os.write(self._closed_write, b"x")
        while True:
            try:
                entry = self._jobs.get_nowait()
            except queue.Empty:
                break
            if entry is not None:
                entry[1].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._closed_read)
        os.close(self._closed_write)

    def _serve(self) -> None:
        """Consumes jobs for one process until it reads None; waits for a reply no longer than the limit."""
        worker: _Worker | None = None
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            try:
                worker = worker or _Worker(self._command, self._closed_read)
                result = worker.score(job, self._timeout_s)
            except _PoolClosed:
                future.cancel()
                continue
            except Exception as error:  # a thread's edge: whoever waits for the answer must hear of it
                if worker is not None:
                    worker.kill()
                    worker = None
                future.set_exception(error)
                continue
            if not worker.is_usable:
                worker.kill()
                worker = None
            future.set_result(result)
        if worker is not None:
            worker.kill()


class _PoolClosed(Exception):
    """The pool was closed while an answer was being graded."""


class _Worker:
    """A scoring process, leader of a group of its own, and the line protocol to it."""

    def __init__(self, command: list[str], closed: int) -> None:
        self._closed = closed
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        search_path = filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,
        )
        self._buffer = b""
        self.is_usable = True
        try:
            is_ready = bool(self._read_line(_START_LIMIT_S))
        except _PoolClosed:
            self.kill()
            raise
        if not is_ready:
            last_words = self._last_words()
            self.kill()
            raise RuntimeError(f"the reward function cannot be loaded: {' '.join(command[3:5])}\n{last_words}")

    def score(self, job: ScoringJob, timeout_s: float) -> ScoringResult:
        """The result of one job; after a time-out or a crash ``is_usable`` is False."""
        line = self._read_line(timeout_s) if self._write(job) else b""
        if not line:
            how = f"took more than {timeout_s:g} s" if line is None else "ended its process"
            logger.warning("grading %s; counted as ungraded: %.120r", how, job.solution_str)
            self.is_usable = False
            return UNGRADED
        reply = json.loads(line)
        if "error" in reply:
            logger.warning("grading raised %s; counted as ungraded: %.120r", reply["error"], job.solution_str)
            return UNGRADED
        return ScoringResult(reply["parts"], True)

    def kill(self) -> None:
        """Ends the process and whatever it started, and waits for it."""
        os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            _close(stream)

    def _write(self, job: ScoringJob) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _read_line(self, timeout_s: float) -> bytes | None:
        """The next reply; empty when the process ends first, None when the limit passes first."""
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + timeout_s
        poller = select.poll()  # select() refuses file numbers above 1023, which a large driver reaches
        for watched in (descriptor, self._closed):
            poller.register(watched, select.POLLIN)
        while b"\n" not in self._buffer:
            ready = dict(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if self._closed in ready:
                raise _PoolClosed
            if not ready:
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-2000:]


def _close(stream: BinaryIO | Any) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        logger.debug("a killed grader had unread input")
