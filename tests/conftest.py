"""Settings for all tests: where our packages are found, and that no process outlives the run."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.left_out import LEFT_OUT

ROOT = Path(__file__).resolve().parents[1]
# Inherited by every process that a test starts, however deep and whoever adopts it, so the leftovers can be found.
TAG_NAME = "R1_ZERO_TEST_SESSION"
LEFT_OUT_KEY = "left_out"
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
    if not _is_worker(config):
        os.environ[TAG_NAME] = uuid.uuid4().hex


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the files, runs of the whole job come first: the longest files must not be the last."""
    if _is_worker(config):
        items.sort(key=lambda item: "system" not in item.path.parts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over from a process of pytest-xdist what its run left out."""
    node.config.stash.setdefault(LEFT_OUT, set()).update(node.workeroutput.get(LEFT_OUT_KEY, ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a process that it started still lives, and end that process."""
    if _is_worker(session.config):
        session.config.workeroutput[LEFT_OUT_KEY] = sorted(session.config.stash.get(LEFT_OUT, ()))
        return
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which device tests were left out."""
    left_out = config.stash.get(LEFT_OUT, set())
    if left_out:
        terminalreporter.write_line(
            f"NOT COLLECTED: {len(left_out)} files of device tests in tests/npu, because this environment has no "
            "simulated NPU. `bash tests/npu/run.sh` makes one and runs them."
        )


def _is_worker(config: pytest.Config) -> bool:
    """Whether this is one of the processes among which pytest-xdist deals out the tests."""
    return hasattr(config, "workerinput")


def leftover_processes(grace_s: float) -> list[tuple[psutil.Process, str]]:
    """Living processes that carry this run's tag, with their command lines, after up to ``grace_s`` seconds."""
    psutil.wait_procs([process for process, _ in _tagged_processes()], timeout=grace_s)
    return _tagged_processes()


def _tagged_processes() -> list[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.environ().get(TAG_NAME) != os.environ[TAG_NAME]:
                continue
            command = " ".join(process.cmdline())
            is_helper = process.ppid() == os.getpid() and any(helper in command for helper in HELPERS)
            if process.status() != psutil.STATUS_ZOMBIE and not is_helper:
                found.append((process, command[:200]))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or somebody else's
    return found
