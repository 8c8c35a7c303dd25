"""The pool's side of a scoring process: it sends requests, reads replies, and can kill the process at any time."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

from verl.utils.child_process import child_environment
from verl.utils.reward_score.functions import RewardFunctionSpec

logger = logging.getLogger(__name__)

_START_LIMIT_S = 180.0
_ASYNC_GRACE_S = 1.0  # an async call ends its own samples at the limit; what then still blocks is ended from outside
_PIPE_BYTES = 1 << 16  # that a pipe takes at once
_KILL_S = 30.0  # from SIGKILL to the end of a process, which a driver or a disk may hold for a while
# What Python, libc, C++, torch and the dynamic linker write when they cannot have memory.
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|[Cc]annot allocate memory|can't allocate memory|[Nn]ot enough memory|out of memory|"
    r"failed to map segment|Unable to allocate|unable to mmap|can't start new thread"
)
_EXIT_S = 0.5  # from the end of a process's output to its exit


class PoolClosed(Exception):
    """The pool was closed while an answer was being graded."""


class ScoringProcess:
    """A scoring process, which leads a process group of its own, and the line protocol to it.

    Args:
        functions: the functions that it loads; a call names one by its index.
        timeout_s: seconds that one call may take.
        closed: a file descriptor that becomes readable when the pool closes.
        memory_limit_mb: MiB of address space, ``reward_model.memory_limit_mb``; 0 sets no limit.

    Attributes:
        kinds: by index, whether a loaded function is batched and async, and the digest of its file (``version``).
        is_usable: cleared by a time-out or a crash.
        num_tasks_left: asyncio tasks that earlier calls left behind: a module's own, or forgotten ones that may block
            the next call.

    Raises:
        RuntimeError: a function cannot be loaded; the message ends with the process's standard error.
        PoolClosed: the pool was closed while the process started.
    """

    def __init__(
        self, functions: Sequence[RewardFunctionSpec], timeout_s: float, closed: int, memory_limit_mb: int = 0
    ) -> None:
        self._closed = closed
        self._timeout_s = timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        arguments = [json.dumps([asdict(function) for function in functions]), str(timeout_s), str(memory_limit_mb)]
        arguments.append(str(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl.utils.reward_score.scoring_worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env=child_environment(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a request may not wait for ever to be read
        self._buffer = b""
        self.is_usable = True
        self.num_tasks_left = 0
        try:
            ready = self._read_line(time.monotonic() + _START_LIMIT_S)
        except PoolClosed:
            self.kill()
            raise
        if not ready:
            stderr = self._stderr_tail()
            self.kill()
            names = ", ".join(f"{function.name} of {function.path}" for function in functions)
            raise RuntimeError(f"the reward function cannot be loaded: {names}\n{stderr}{self._memory_hint(stderr)}")
        self.kinds: list[dict[str, Any]] = json.loads(ready)["ready"]

    def most_samples(self, function: int, batch_size: int, max_concurrent: int) -> int:
        kind = self.kinds[function]
        return batch_size if kind["is_batched"] else max_concurrent if kind["is_async"] else 1

    def score(self, function: int, samples: Sequence[list[Any]]) -> dict[str, Any]:
        """The worker's reply (``scoring_worker``) with ``seconds``; a time-out or a crash clears ``is_usable``."""
        start = time.monotonic()
        limit_s = self._timeout_s + (_ASYNC_GRACE_S if self.kinds[function]["is_async"] else 0.0)
        request = json.dumps({"function": function, "samples": samples}).encode() + b"\n"
        is_sent = self._write(request, start + limit_s)
        line = self._read_line(start + limit_s) if is_sent else None if is_sent is None else b""
        if line:
            reply: dict[str, Any] = json.loads(line)
            self.num_tasks_left = reply.pop("tasks_left")
            has_timeout = any("timeout" in result for result in reply.get("results", ()))
            self.is_usable = not (has_timeout and self.num_tasks_left)  # they may be what that sample left running
            for outcome in (reply, *reply.get("results", ())):
                if "error" in outcome:
                    outcome["error"] += self._memory_hint(outcome["error"])
            return reply
        self.is_usable = False
        seconds = time.monotonic() - start
        if line is None:
            return {"timeout": f"took more than {limit_s:g} s", "seconds": seconds}
        how = f"ended its process: {self._how_it_ended()}"
        return {"error": how + self._memory_hint(self._stderr_tail()), "seconds": seconds}

    def kill(self) -> None:
        """Ends the process and whatever it started, and waits for it."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            logger.warning("grader %d has not ended %g s after it was killed", self._process.pid, _KILL_S)
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            _close(stream)

    def _write(self, request: bytes, deadline: float) -> bool | None:
        """Whether the process took the request; False when it ended first, None when the deadline passed first."""
        assert self._process.stdin is not None
        descriptor, rest = self._process.stdin.fileno(), memoryview(request)
        while rest:
            if not self._is_ready(descriptor, select.POLLOUT, deadline):
                return None
            try:
                rest = rest[os.write(descriptor, rest[:_PIPE_BYTES]) :]
            except BlockingIOError:
                continue  # less room than poll has seen
            except BrokenPipeError:
                return False
        return True

    def _is_ready(self, descriptor: int, event: int, deadline: float) -> bool:
        """Waits for a pipe; False when the deadline passes first, PoolClosed when the pool closes."""
        poller = select.poll()  # select() refuses file numbers above 1023, which a large driver reaches
        poller.register(descriptor, event)
        poller.register(self._closed, select.POLLIN)
        ready = dict(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if self._closed in ready:
            raise PoolClosed
        return bool(ready)

    def _memory_hint(self, text: str) -> str:
        """The limit on memory, where ``text`` says that memory could not be had."""
        if not self._memory_limit_mb or not _NO_MEMORY.search(text):
            return ""
        return (
            f" (a scoring process may use {self._memory_limit_mb} MiB of address space: raise "
            "reward_model.memory_limit_mb, 0 sets no limit)"
        )

    def _read_line(self, deadline: float) -> bytes | None:
        """The next reply; empty when the process ends first, None when the deadline passes first."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not self._is_ready(descriptor, select.POLLIN, deadline):
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        """Its signal or exit code, read without reaping it: its group must still be killed by its number."""
        deadline = time.monotonic() + _EXIT_S
        while (ended := os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
            if time.monotonic() > deadline:
                return "its output was closed"
            time.sleep(0.01)
        if ended.si_code == os.CLD_EXITED:
            return f"exit code {ended.si_status}"
        return f"signal {signal.Signals(ended.si_status).name}"

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")[-2000:]


def _close(stream: BinaryIO | Any) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        logger.debug("a killed grader had unread input")
