"""Workers of a conversion: an error, a death or an end of interest ends all of them at once, and is said."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import pytest

from mindspeed_llm.conversion.pool import run_tasks


def work(task: str, on_bytes: Callable[[int], None]) -> str:
    on_bytes(3)
    if task == "endless":
        time.sleep(3600)
    if task == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        on_bytes(4)
        time.sleep(3600)
    if task == "short":
        time.sleep(0.05)
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "full":
        raise OSError(errno.ENOSPC, "no space left")
    return task.upper()


@pytest.mark.parametrize(("task", "message"), [("killed", "died while it had killed"), ("full", "no space left")])
def test_what_ends_one_worker_ends_all(task: str, message: str) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(OSError, match=message):
        list(run_tasks(work, ["endless", task, "quick"], 2, lambda _: None))
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.slow
def test_a_worker_that_does_not_end_is_killed() -> None:
    before, reported = set(multiprocessing.active_children()), []
    found = run_tasks(work, ["deaf", *["short"] * 600], 2, reported.append)
    while 4 not in reported:
        assert next(found)[0] == "short"
    found.close()
    assert set(multiprocessing.active_children()) <= before


def test_workers_end_with_the_loop_that_wanted_them() -> None:
    before, reported = set(multiprocessing.active_children()), []
    found = run_tasks(work, ["endless", "quick"], 2, reported.append)
    assert next(found) == ("quick", "QUICK")
    assert 3 in reported
    found.close()
    assert set(multiprocessing.active_children()) <= before
