"""Settings for all tests: where our packages are found, what is quick, and that no process outlives the run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests.compiler import HAS_COMPILER, REASON, REMEDY, UNCOMPILED, builds_kernels
from tests.left_out import LEFT_OUT
from tests.parallel.preloaded import PRELOADED
from tests.process_starters import runs_whole_jobs, starts_processes

ROOT = Path(__file__).resolve().parents[1]
# Every process that a test starts inherits it, at any depth and whoever adopts it: that is how leftovers are found.
TAG_NAME = "R1_ZERO_TEST_SESSION"
LEFT_OUT_KEYS = {"left_out": LEFT_OUT, "uncompiled": UNCOMPILED}
# Python's own helpers end by themselves with the process that started them. Ranks forked by the server of
# tests/parallel/launcher.py carry its command line too, so only this process's own children count as helpers.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

settings.register_profile("tests", deadline=None)  # a slow example on a busy machine is no failure; not in ranks
settings.load_profile("tests")

# Triton's kernels are interpreted, because tests need no GPU. Triton reads this when it is imported, which the conftest
# of a folder below does.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Let subprocesses import our packages, keep them to one thread, tag them, and fork them with torch imported."""
    gc.disable()  # until all is collected: what imports make lives on, and each walk over it takes half a second
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    if not _is_worker(config):
        os.environ[TAG_NAME] = uuid.uuid4().hex


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that could not be imported without a compiler; everything else is pytest's own decision."""
    if HAS_COMPILER or not builds_kernels(collection_path):
        return None
    config.stash.setdefault(UNCOMPILED, set()).add(collection_path.name)
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of files that start processes; where processes share the files, put the longest files first.

    Tests that need a newer torch than the installed one are skipped.
    """
    torch_version = _numbers(metadata.version("torch"))
    for item in items:
        for needs in item.iter_markers("needs_torch"):
            version, reason = needs.args
            if torch_version < _numbers(version):
                item.add_marker(pytest.mark.skip(reason=f"needs torch {version}: {reason}"))
        if starts_processes(item.path):
            item.add_marker("processes")
    if _is_worker(config):
        items.sort(key=lambda item: (not runs_whole_jobs(item.path), item.get_closest_marker("processes") is None))


def pytest_collection_finish() -> None:
    """Turn the garbage collector on again, with what is there by now among its oldest objects, and let it run seldom.

    With Python's thresholds, made for small programs, a seventh of the time of tests in one process would be its walks.
    """
    gc.freeze()
    gc.unfreeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_stays() -> Iterator[None]:
    """Fail the last test of a file that leaves torch.distributed initialised, which other files' tests would find."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        from megatron.core.parallel_state import destroy_model_parallel  # torch is imported by now

        destroy_model_parallel()
        distributed.destroy_process_group()
        pytest.fail("a test of this file left torch.distributed initialised in this process")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the names of the files that a process of pytest-xdist left out."""
    for name, key in LEFT_OUT_KEYS.items():
        node.config.stash.setdefault(key, set()).update(getattr(node, "workeroutput", {}).get(name, ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a process that it started still lives, and end that process."""
    gc.freeze()  # pytest and Python walk over all objects several times as they end
    if _is_worker(session.config):
        for name, key in LEFT_OUT_KEYS.items():
            session.config.workeroutput[name] = sorted(session.config.stash.get(key, ()))
        return
    left = leftover_processes()
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
    """Report what was left out for want of a tool: device tests, and tests of compiled kernels."""
    left_out = config.stash.get(LEFT_OUT, set())
    if left_out:
        skipped = os.environ.get("DEVICE_TESTS_SKIPPED")  # tests/run.sh: why there is no simulated NPU
        reason = skipped or "this environment has no simulated NPU; `bash tests/npu/run.sh` makes one and runs them"
        terminalreporter.write_line(f"NOT COLLECTED: {len(left_out)} files of device tests in tests/npu: {reason}")
    files = config.stash.get(UNCOMPILED, set())
    tests = [report for report in terminalreporter.getreports("skipped") if REASON in str(report.longrepr)]
    if files or tests:
        terminalreporter.write_line(
            f"LEFT OUT: {len(files)} files and {len(tests)} other tests, because a compiler is not found: {REMEDY}"
        )


def _numbers(version: str) -> list[int]:
    """2.13.0+cpu as [2, 13, 0]."""
    return [int(part) for part in version.split("+")[0].split(".")]


def _is_worker(config: pytest.Config) -> bool:
    """Return whether this is one of the processes that run tests for pytest-xdist."""
    return hasattr(config, "workerinput")


def leftover_processes() -> list[tuple[psutil.Process, str]]:
    """Return the processes with this run's tag that still live after 5 seconds, with their command lines.

    Python's helpers of workers that have ended get 25 more: beside other load they see late that these have gone.
    """
    psutil.wait_procs([process for process, _ in _tagged_processes()], timeout=5)
    helpers = [process for process, command in _tagged_processes() if any(helper in command for helper in HELPERS)]
    psutil.wait_procs(helpers, timeout=25)
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
            continue  # it has ended, or belongs to another user
    return found


@pytest.fixture
def registries_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers as a user would is gone after it: a name can be taken once in a process."""
    from verl.trainer.ppo.algos import ESTIMATORS
    from verl.trainer.ppo.policy_losses import LOSSES
    from verl.workers.reward_manager import MANAGERS

    for registry in (ESTIMATORS, LOSSES, MANAGERS):
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
