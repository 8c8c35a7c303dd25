"""Runs a few lines of Python in a process of its own, for tests of what a process reads once, at its start."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_python(code: str, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with ``environment`` over this process's own, and return what came of it."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def output_of(code: str, timeout_s: float = 60, **environment: str) -> str:
    """What ``code`` prints; the process must end well."""
    done = run_python(code, timeout_s, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("Warning: ASCEND_HOME_PATH environment variable is not set.\n", "").strip()
