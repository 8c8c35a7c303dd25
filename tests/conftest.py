"""Settings for all tests: where our packages are found, and that no process outlives the run."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
# Inherited by every process that a test starts, however deep and whoever adopts it, so the leftovers can be found.
TAG_NAME = "R1_ZERO_TEST_SESSION"
TAG_VALUE = uuid.uuid4().hex
# Python's own helpers: they end by themselves with the process that started them. Ranks forked by the server of
# tests/parallel/launcher.py carry its command line too, so only this process's own children count as helpers.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def pytest_configure(config: pytest.Config) -> None:
    """Let subprocesses import our packages, keep them to one thread, and tag them."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ[TAG_NAME] = TAG_VALUE


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a process that it started still lives, and end that process."""
    left = leftover_processes(grace_s=5.0)
    if not left:
        return
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for process, command in left:
        if reporter is not None:
            reporter.write_line(f"ERROR: left behind by a test: pid {process.pid}: {command}", red=True)
        process.kill()
    psutil.wait_procs([process for process, _ in left], timeout=5)


def leftover_processes(grace_s: float) -> list[tuple[psutil.Process, str]]:
    """Living processes that carry this run's tag, with their command lines, after up to ``grace_s`` seconds."""
    psutil.wait_procs([process for process, _ in _tagged_processes()], timeout=grace_s)
    return _tagged_processes()


def _tagged_processes() -> list[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.environ().get(TAG_NAME) != TAG_VALUE:
                continue
            command = " ".join(process.cmdline())
            is_helper = process.ppid() == os.getpid() and any(helper in command for helper in HELPERS)
            if process.status() != psutil.STATUS_ZOMBIE and not is_helper:
                found.append((process, command[:200]))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or somebody else's
    return found
