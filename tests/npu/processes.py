"""Runs a few lines of Python in a process of its own, for tests of what a process reads once.

That process is forked from the server of ``tests/parallel/launcher.py``, which has torch and torch_npu imported and has
touched no device; a test of the import itself asks for a fresh interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path


def run_python(code: str, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with ``environment`` over this process's own, and return what came of it."""
    with tempfile.TemporaryDirectory(prefix="python-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(textwrap.dedent(code), {**os.environ, **environment}, str(out), str(err)), daemon=True
        )
        process.start()
        try:
            process.join(timeout_s)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(code, timeout_s)
        finally:
            process.kill()
            process.join()
        return subprocess.CompletedProcess(code, process.exitcode, out.read_text(), err.read_text())


def _run(code: str, environment: dict[str, str], out: str, err: str) -> None:
    sys.stdout.flush()  # what the forking server's imports printed is not this process's output
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.update(environment)
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def output_of(code: str, timeout_s: float = 60, **environment: str) -> str:
    """What ``code`` prints; the process must end well."""
    return _printed(run_python(code, timeout_s, **environment))


def output_of_fresh(code: str, timeout_s: float = 60) -> str:
    """The same of an interpreter that has imported nothing."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return _printed(subprocess.run(command, capture_output=True, text=True, timeout=timeout_s))


def _printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("Warning: ASCEND_HOME_PATH environment variable is not set.\n", "").strip()
