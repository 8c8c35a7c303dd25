"""A test run that leaves a process behind fails, names it, and ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
LEAVES_ONE = """
import subprocess, sys
def test_leaves_one():
    # A session of its own, as a daemon has: no longer a child of anything in the test run.
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']).pid)"
    out = subprocess.run([sys.executable, "-c", code], stdout=open("pid", "w"), start_new_session=True)
"""


def run_pytest(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(folder), "test_it.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="one process", marks=pytest.mark.slow),
        pytest.param(("-n", "2"), id="two workers"),  # as the default run is
    ],
)
def test_a_process_left_behind_fails_the_run_and_is_ended(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run_pytest(tmp_path, LEAVES_ONE, *arguments)
    pid = int((tmp_path / "pid").read_text())
    assert done.returncode == 1, done.stdout
    assert f"left behind by a test: pid {pid}" in done.stdout
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow  # every run of these tests is one
def test_a_clean_run_passes(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, "def test_fine():\n    pass\n").returncode == 0
