"""Score answers in processes that can be killed, so that no answer can hang, crash or take over the run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl.utils.reward_score.functions import RewardFunctionSpec, function_of
from verl.utils.reward_score.scoring_process import PoolClosed, ScoringProcess

logger = logging.getLogger(__name__)

_CACHE_BYTES = 256 << 20
_GRADE_BYTES = 2048  # a future and its result, without the texts


@dataclass(frozen=True)
class ScoringJob:
    """One answer to grade; ``ground_truth`` and ``extra_info`` must be JSON, in which 1, 1.0, true and "1" differ."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).digest()

    @property
    def values(self) -> list[Any]:
        """The arguments of a reward function, in order."""
        return [self.data_source, self.solution_str, self.ground_truth, self.extra_info]


@dataclass(frozen=True)
class ScoringResult:
    """The grade of one answer, or the reason why it has none.

    Attributes:
        parts: at least ``score``, which is 0 unless ``status`` is ok.
        status: ``ok``; ``timeout`` when the answer took longer than its limit; ``error`` when the function raised,
            returned no finite score, or its process ended.
        error: what happened, else empty.
        parse: texts that the function returned beside its numbers, such as the answer that it read.
        seconds: duration of the call, which a batch shares.
        function, version: the function that graded, and the digest of its file (``functions.RewardFunction.version``).
    """

    parts: dict[str, float]
    status: str = "ok"
    error: str = ""
    parse: dict[str, str | None] = field(default_factory=dict)
    seconds: float = 0.0
    function: RewardFunctionSpec | None = None
    version: str = ""

    @property
    def is_graded(self) -> bool:
        return self.status == "ok"


class _Grades:
    """The futures of answers, by the digest of their jobs: all that are being graded, and the newest good grades.

    An answer that timed out or whose grader failed is forgotten, so that it is graded anew when it comes again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._futures: dict[bytes, Future[ScoringResult]] = {}
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # of the good grades, oldest first
        self._num_bytes = 0
        self._lock = threading.Lock()

    def future(self, job: ScoringJob) -> tuple[Future[ScoringResult], bool]:
        """The future of this job's grade, and whether it is new, so that the caller must see to it."""
        digest = job.digest
        with self._lock:
            if digest in self._futures:
                return self._futures[digest], False
            future = self._futures[digest] = Future()
        future.add_done_callback(partial(self._finished, digest))
        return future, True

    def _finished(self, digest: bytes, future: Future[ScoringResult]) -> None:
        is_good = not future.cancelled() and future.exception() is None and future.result().is_graded
        with self._lock:
            if not is_good:
                del self._futures[digest]
                return
            size = _GRADE_BYTES + sum(len(text or "") for text in future.result().parse.values())
            self._sizes[digest] = size
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                oldest, size = self._sizes.popitem(last=False)
                del self._futures[oldest]
                self._num_bytes -= size


@dataclass(frozen=True)
class _Entry:
    """A waiting job.

    It is graded alone, in a process without tasks of earlier calls, after a call failed that had several jobs or such
    tasks, so that only the faulty one is lost.
    """

    job: ScoringJob
    future: Future[ScoringResult]
    function: int
    is_alone: bool = False


class ScoringPool:
    """``num_workers`` processes, each call with a wall-clock limit of its own.

    Args:
        function: grades every data source that ``by_source`` does not name; None means ``default_compute_score``.
        by_source: maps a data source or a pattern to its function.
        timeout_s: seconds that one call may take, after which its process is killed and replaced. The answers of a call
            for several are then graded one by one, and one that takes too long again counts as timed out.
        batch_size, max_concurrent: the most answers in one call of a batched function, and of an async one.
        memory_limit_mb: MiB of address space of each process; 0 sets no limit.
    """

    def __init__(
        self,
        function: RewardFunctionSpec | None,
        *,
        by_source: Mapping[str, RewardFunctionSpec] | None = None,
        num_workers: int,
        timeout_s: float,
        batch_size: int = 64,
        max_concurrent: int = 16,
        memory_limit_mb: int = 0,
    ) -> None:
        self._default = function
        self._by_source = dict(by_source or {})
        self._functions: list[RewardFunctionSpec] = []
        for named in filter(None, [function, *self._by_source.values()]):
            self._number_of(named)
        self._timeout_s = timeout_s
        self._batch_size, self._max_concurrent = batch_size, max_concurrent
        self._memory_limit_mb = memory_limit_mb
        self._closed_read, self._closed_write = os.pipe()  # readable, for every waiting thread, once the pool closes
        self._waiting: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._grades = _Grades(_CACHE_BYTES)
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[ScoringJob]) -> list[Future[ScoringResult]]:
        """One future per job, in order; equal jobs share one."""
        futures = []
        entries = []
        for job in jobs:
            future, is_new = self._grades.future(job)
            if is_new:
                function = self._number_of(function_of(job.data_source, self._by_source, self._default))
                entries.append(_Entry(job, future, function))
            futures.append(future)
        self._add(sorted(entries, key=lambda entry: entry.function))  # beside each other they can share a call
        return futures

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            while self._waiting:
                self._waiting.popleft().future.cancel()
            self._changed.notify_all()
        os.write(self._closed_write, b"x")
        for thread in self._threads:
            thread.join()
        os.close(self._closed_read)
        os.close(self._closed_write)

    def _number_of(self, function: RewardFunctionSpec) -> int:
        """Index of ``function`` in the list that every process loads; equal functions share one."""
        if function not in self._functions:
            self._functions.append(function)
        return self._functions.index(function)

    def _add(self, entries: Sequence[_Entry]) -> None:
        with self._changed:
            if self._is_closed:
                for entry in entries:
                    entry.future.cancel()
            self._waiting.extend([] if self._is_closed else entries)
            self._changed.notify_all()

    def _serve(self) -> None:
        """Consumes entries for one process until the pool closes; waits for a reply no longer than the limit."""
        process: ScoringProcess | None = None
        while (first := self._first()) is not None:
            entries = [first]
            try:
                if process is not None and not self._suits(process, first):
                    process.kill()
                    process = None
                process = process or ScoringProcess(
                    self._functions, self._timeout_s, self._closed_read, self._memory_limit_mb
                )
                entries += self._companions(first, process)
                results = self._score(process, entries)
            except PoolClosed:
                for entry in entries:
                    entry.future.cancel()
                continue
            except Exception as error:  # the edge of a thread: the error goes to whoever waits for the answer
                if process is not None:
                    process.kill()
                    process = None
                for entry in entries:
                    entry.future.set_exception(error)
                continue
            if not process.is_usable:
                process.kill()
                process = None
            if results is None:
                self._add([_Entry(entry.job, entry.future, entry.function, is_alone=True) for entry in entries])
                continue
            for entry, result in zip(entries, results, strict=True):
                entry.future.set_result(result)
        if process is not None:
            process.kill()

    @staticmethod
    def _suits(process: ScoringProcess, first: _Entry) -> bool:
        return first.function < len(process.kinds) and not (first.is_alone and process.num_tasks_left)

    def _first(self) -> _Entry | None:
        """The next entry; None once the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return None if self._is_closed else self._waiting.popleft()

    def _companions(self, first: _Entry, process: ScoringProcess) -> list[_Entry]:
        """The next entries that join ``first`` in its call, at most this process's share of all that wait."""
        if first.is_alone:
            return []
        with self._changed:
            share = -(-(len(self._waiting) + 1) // len(self._threads))
            limit = min(share, process.most_samples(first.function, self._batch_size, self._max_concurrent))
            taken: list[_Entry] = []
            while self._waiting and len(taken) + 1 < limit:
                if self._waiting[0].function != first.function or self._waiting[0].is_alone:
                    break
                taken.append(self._waiting.popleft())
            return taken

    def _score(self, process: ScoringProcess, entries: Sequence[_Entry]) -> list[ScoringResult] | None:
        """A result for each; None when the call failed as a whole, perhaps not because of its only answer."""
        number, had_tasks = entries[0].function, process.num_tasks_left > 0
        reply = process.score(number, [entry.job.values for entry in entries])
        if "results" not in reply:
            if not entries[0].is_alone and (len(entries) > 1 or (had_tasks and not process.is_usable)):
                logger.warning("grading %d answers in one call: %s; each is graded alone", len(entries), reply)
                return None
            reply["results"] = [reply]
        results = []
        for entry, outcome in zip(entries, reply["results"], strict=True):
            status = next((name for name in ("timeout", "error") if name in outcome), "ok")
            if status != "ok":
                logger.warning("ungraded, %s: %s: %.120r", status, outcome[status], entry.job.solution_str)
            results.append(
                ScoringResult(
                    outcome.get("parts", {"score": 0.0}),
                    status,
                    outcome.get(status, ""),
                    outcome.get("parse", {}),
                    reply["seconds"],
                    self._functions[number],
                    process.kinds[number]["version"],
                )
            )
        return results
