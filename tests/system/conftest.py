"""What the system tests share: one prepared job, and one run of it that nothing disturbs."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.ray_workers import ray_with_forked_workers
from tests.system.in_process import convert, run_stages_here
from tests.system.jobs import Job, Prepared, prepare

T = TypeVar("T")


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """Return the result of ``make``, which one process of the pytest run calls with a folder that all of them share.

    Waits for the folder's lock: the process that calls ``make`` releases it when it has finished or died.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared_{name}"
    result = folder.with_suffix(".pickle")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            folder.mkdir()  # FileExistsError: another process has tried and failed
            made = pickle.dumps(make(folder))
            result.write_bytes(made)
    loaded: T = pickle.loads(result.read_bytes())
    return loaded


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_with_forked_workers(num_cpus=2):
        yield


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The inputs of every run here."""
    return made_once(tmp_path_factory, "prepared", prepare)


@pytest.fixture(scope="session")
def converted(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The same inputs for a run that begins with its training."""
    return made_once(tmp_path_factory, "converted", lambda folder: convert(prepared, folder))


@pytest.fixture(scope="session")
def uninterrupted(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The reference: the whole job run through once on one machine; it keeps what its steps trained on."""

    def run(folder: Path) -> Job:
        job = Job(prepared, folder)
        run_stages_here(prepared, job.output_dir, job.steps, "trainer.save_rollouts=True")
        return job

    return made_once(tmp_path_factory, "uninterrupted", run)
