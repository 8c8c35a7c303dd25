"""The processes of one launch: started in sessions of their own, found again by a tag, all gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from recipes.common.launcher import child

TAG_NAME = "RECIPE_LAUNCH"


class OwnProcesses:
    """Starts processes and ends them and all that they started, however deep, and nobody else's.

    Every process inherits ``RECIPE_LAUNCH=<tag of this launch>``; what carries it is ours, also when its parent has
    died and somebody else adopted it.
    """

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        cwd: Path,
        standard_input: bytes = b"",
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` with stdout and stderr to ``output``; it is sent SIGTERM if this process dies first.

        ``standard_input`` is what it reads there, at most what a pipe holds (64 KiB).
        """
        process = subprocess.Popen(
            [sys.executable, str(Path(child.__file__)), str(os.getpid()), *command],
            env={**environment, TAG_NAME: self.tag},
            stdin=subprocess.PIPE if standard_input else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            start_new_session=True,
        )
        if process.stdin is not None:
            process.stdin.write(standard_input)
            process.stdin.close()
        self._started.append(process)
        return process

    def end_all(self, grace_s: float = 10.0) -> list[str]:
        """End what is left: SIGTERM to what we started, then SIGKILL to all that carries our tag.

        Returns the command lines of processes that are still there after that (uninterruptible ones); empty is good.
        """
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        psutil.wait_procs(self._ours(), timeout=grace_s)
        for survivor in self._ours():
            _kill(survivor)
        _, alive = psutil.wait_procs(self._ours(), timeout=5.0)
        for process in self._started:
            process.poll()  # collects the exit status of what was ended
        return [f"pid {process.pid}" for process in alive]

    def _ours(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.pid != os.getpid() and process.environ().get(TAG_NAME) == self.tag
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue  # ended meanwhile, or somebody else's
        return found


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()  # psutil compares the creation time first, so a reused pid is safe
    except psutil.NoSuchProcess:
        return


def how_it_ended(returncode: int) -> str:
    """An exit status in words: the signal's name, or the number."""
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"ended with exit status {returncode}"
