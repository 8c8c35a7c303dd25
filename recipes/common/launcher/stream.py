"""Run one command of the job: its output on the console and in a log file, ended early when something else fails."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from recipes.common.launcher.processes import OwnProcesses
from recipes.common.recipe import ROOT

POLL_S = 0.2


def run_streaming(
    processes: OwnProcesses,
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    console: Console,
    check: Callable[[], None],
) -> tuple[int, int]:
    """Run ``command`` to its end; returns (pid, exit status, negative for a signal).

    ``check`` is called several times a second and raises to end the command: the caller then ends all processes.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    process = processes.start(command, environment, subprocess.PIPE, ROOT)
    is_muted = threading.Event()
    reader = threading.Thread(target=_copy_lines, args=(process, log_path, console, is_muted), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            check()
            time.sleep(POLL_S)
        status = process.returncode
    except BaseException:
        is_muted.set()  # what a command says while it is being ended is for the log alone: the reason stands last
        raise
    reader.join(timeout=5.0)  # a grandchild may hold the pipe open; what it still says is not worth waiting for
    return process.pid, status


def _copy_lines(process: subprocess.Popen[bytes], log_path: Path, console: Console, is_muted: threading.Event) -> None:
    assert process.stdout is not None
    with log_path.open("ab") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            if not is_muted.is_set():
                console.print(line.decode(errors="replace").rstrip("\n"))
