"""The pipes of a sandboxed program, all served at once, so that a full pipe blocks neither side."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from pathlib import Path
from types import TracebackType

from verl.utils.reward_score.sandbox.limits import SandboxLimits

START_S = 10.0  # for an interpreter to start and give up its rights, before the program's time begins
_POLL_S = 0.01  # how often its threads are counted
_CHUNK = 1 << 16
_NUM_THREADS = 17  # of /proc/N/stat, counted from behind the command's name


class Channels:
    """Five pipes: into the program ``control`` and ``stdin``, out of it ``stdout``, ``stderr`` and ``report``.

    ``with`` closes every end that is still open. Start the process with the far ends, then ``start``, then ``pump``.
    """

    def __init__(self, control: bytes, stdin: bytes) -> None:
        self._far: dict[str, int] = {}
        self._near: dict[str, int] = {}
        self._unsent = {"control": memoryview(control), "stdin": memoryview(stdin)}
        self._received = {name: bytearray() for name in ("stdout", "stderr", "report")}
        self._selector = selectors.DefaultSelector()
        self.began_at: float | None = None  # by time.monotonic()

    def __enter__(self) -> Channels:
        for name in self._unsent:
            self._far[name], self._near[name] = os.pipe()
        for name in self._received:
            self._near[name], self._far[name] = os.pipe()
        for name, descriptor in self._near.items():
            os.set_blocking(descriptor, False)
            event = selectors.EVENT_WRITE if name in self._unsent else selectors.EVENT_READ
            self._selector.register(descriptor, event, name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._selector.close()
        for descriptor in (*self._far.values(), *self._near.values()):
            os.close(descriptor)

    @property
    def stdin(self) -> int:
        """The program's end, as for ``subprocess.Popen``."""
        return self._far["stdin"]

    @property
    def stdout(self) -> int:
        """The program's end."""
        return self._far["stdout"]

    @property
    def stderr(self) -> int:
        """The program's end."""
        return self._far["stderr"]

    @property
    def inherited(self) -> tuple[int, int]:
        """The program's ends of ``control`` and ``report``, which keep their numbers there."""
        return self._far["control"], self._far["report"]

    def start(self) -> None:
        """Closes the program's ends here: from now on its end is the end of its streams."""
        while self._far:
            os.close(self._far.popitem()[1])

    def pump(self, process: subprocess.Popen[bytes], limits: SandboxLimits) -> str:
        """Moves bytes until the program has ended or met a limit; ``ok`` or the limit's name.

        Waits for the program's streams and its end; unblocked in any case by the limits of the interpreter's start and
        of the program, whose clock begins with the first line of ``report``.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for key, _ in self._selector.select(_POLL_S):
                if key.data in self._unsent:
                    self._send(key.data)
                else:
                    self._receive(key.data)
            if self.began_at is None and b"\n" in self._received["report"]:
                self.began_at = time.monotonic()
                deadline = self.began_at + limits.wall_s
            if max(map(len, self._received.values())) > limits.output_bytes:
                return "output"
            if process.poll() is None:
                if _num_threads(process.pid) > limits.threads:
                    return "threads"
            elif not any(name in self._near for name in self._received):
                return "ok"
        return "timeout"

    def received(self, name: str) -> bytes:
        """All bytes received from ``stdout``, ``stderr`` or ``report``."""
        return bytes(self._received[name])

    def _send(self, name: str) -> None:
        try:
            sent = os.write(self._near[name], self._unsent[name][:_CHUNK])
        except BrokenPipeError:  # the program does not read it
            sent = len(self._unsent[name])
        self._unsent[name] = self._unsent[name][sent:]
        if not self._unsent[name]:
            self._close(name)

    def _receive(self, name: str) -> None:
        chunk = os.read(self._near[name], _CHUNK)
        self._received[name] += chunk
        if not chunk:
            self._close(name)

    def _close(self, name: str) -> None:
        descriptor = self._near.pop(name)
        self._selector.unregister(descriptor)
        os.close(descriptor)


def _num_threads(pid: int) -> int:
    """Threads of a process; 0 when it has just ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(text.rpartition(")")[2].split()[_NUM_THREADS])
