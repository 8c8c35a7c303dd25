"""Run one command of the job: its output on the console and in a log file, ended early when something else fails."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from recipes.r1_zero.launcher.processes import OwnProcesses
from recipes.r1_zero.launcher.settings import ROOT

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
    reader = threading.Thread(target=_copy_lines, args=(process, log_path, console), daemon=True)
    reader.start()
    while True:
        try:
            status = process.wait(timeout=POLL_S)
            break
        except subprocess.TimeoutExpired:
            check()
    reader.join(timeout=5.0)  # a grandchild may hold the pipe open; what it still says is not worth waiting for
    return process.pid, status


def _copy_lines(process: subprocess.Popen[bytes], log_path: Path, console: Console) -> None:
    assert process.stdout is not None
    with log_path.open("ab") as log:
        for line in process.stdout:
            log.write(line)
            log.flush()
            console.print(line.decode(errors="replace").rstrip("\n"))
