"""The processes of one launch: started in sessions of their own, found again by a tag, all gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
from rich.console import Console

from hf_formats import parent_death
from recipes.common.recipe import ROOT

TAG_NAME = "RECIPE_LAUNCH"
POLL_S = 0.2
LAST_LINES = 15
_KILL_S = 5.0


OnStart = Callable[[subprocess.Popen[bytes]], object]  # gets a process that has been started


class RunFailed(RuntimeError):
    """The run cannot continue; the text says what died or failed."""


class OwnProcesses:
    """Starts processes and ends them and all that they started, however deep, and nobody else's.

    Every process inherits ``RECIPE_LAUNCH=<tag of this launch>``, so it is found also when its parent has died.
    """

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        standard_input: bytes = b"",
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` with stdout and stderr to ``output``; it is sent SIGTERM if this process dies first.

        ``standard_input`` is what it reads there, at most what a pipe holds (64 KiB).
        """
        process = subprocess.Popen(
            [sys.executable, parent_death.__file__, str(os.getpid()), *command],
            env={**environment, TAG_NAME: self.tag},
            stdin=subprocess.PIPE if standard_input else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
        self._started.append(process)
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended without reading; its exit status says why
                process.stdin.write(standard_input)
                process.stdin.close()
        return process

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        console: Console,
        check: Callable[[], None],
        on_start: OnStart,
    ) -> tuple[int, int]:
        """Run ``command`` to its end, its output on the console and in ``log_path``; returns pid and exit status.

        ``check`` is called several times a second and raises to end the command: the caller then ends all processes.
        ``on_start`` gets the process.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log, log_path.open("rb") as output:
            output.seek(0, os.SEEK_END)
            process = self.start(command, environment, log)
            on_start(process)
            partial = b""
            while True:
                status = process.poll()  # before the read, which then has all that the command has written
                *lines, partial = (partial + output.read()).split(b"\n")
                if status is not None and partial:
                    lines.append(partial)
                for line in lines:
                    console.print(line.decode(errors="replace"))
                if status is not None:
                    return process.pid, status
                check()
                time.sleep(POLL_S)

    def end_all(self, grace_s: float = 10.0) -> list[str]:
        """End all processes: SIGTERM to those started here, then SIGKILL to every one that carries our tag.

        Returns the process ids that are still there after that (uninterruptible ones); empty is good.
        """
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        psutil.wait_procs(self._ours(), timeout=grace_s)
        survivors = self._ours()
        for survivor in survivors:
            with suppress(psutil.NoSuchProcess):
                survivor.kill()  # psutil compares the creation time first, so a reused pid is safe
        survivors += self._ours()  # not these alone: a process that is dying has no environment to be known by
        deadline = time.monotonic() + _KILL_S
        while (alive := [process for process in survivors if _is_alive(process)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in self._started:
            process.poll()  # collects the exit status
        return [f"pid {pid}" for pid in sorted({process.pid for process in alive})]

    def _ours(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            # A process that has ended meanwhile, or is another user's, is not one of ours.
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_ours = process.pid != os.getpid() and process.environ().get(TAG_NAME) == self.tag
                if is_ours and _is_alive(process):
                    found.append(process)
        return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def python_path() -> str:
    """PYTHONPATH with the repository in front."""
    return os.pathsep.join([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """The end of what a command has printed."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def how_it_ended(returncode: int) -> str:
    """An exit status in words: the signal's name, or the number."""
    if returncode < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-returncode, f'signal {-returncode}')}"
    return f"ended with exit status {returncode}"
