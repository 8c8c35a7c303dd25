"""A Ray whose workers are forked with torch and the engines imported: importing them takes a worker four seconds.

The server of ``tests/parallel/launcher.py`` forks them. All else is Ray's own: Ray starts a worker by a command, and
the command that it is given here, this file as a program, asks the process of the test for the fork. The worker gets
the arguments and the environment of the command. Ray itself is imported after the fork; it reads the environment then.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ray_with_forked_workers(**settings: Any) -> Iterator[None]:
    """Start Ray on this machine with ``settings`` of ``ray.init``; it and its workers have ended when this returns."""
    import ray

    with forked_workers():
        ray.init("local", include_dashboard=False, log_to_driver=False, **settings)
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def forked_workers() -> Iterator[None]:
    """Have this process fork the workers of every Ray job that it starts before the context ends."""
    import pytest

    with tempfile.TemporaryDirectory(prefix="ray-workers-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        thread = threading.Thread(target=_fork_workers, args=(listener,), daemon=True)
        thread.start()
        runtime_env = {"py_executable": f"{sys.executable} -I -S {os.path.abspath(__file__)} {folder}/socket"}
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": runtime_env}))
                yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def _fork_workers(listener: socket.socket) -> None:
    """Fork a worker for each request; unblocked by requests, ended by the listener's shutdown."""
    context = multiprocessing.get_context("forkserver")
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, connection.makefile("rb") as request:
            arguments, environment = json.load(request)
        context.Process(target=_run_worker, args=(arguments, environment), daemon=True).start()


def _run_worker(arguments: list[str], environment: dict[str, str]) -> None:
    """Do what ``python ARGUMENTS`` does in this environment."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def _request_worker(path: str, arguments: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(path)
        test.sendall(json.dumps([arguments, dict(os.environ)]).encode())


if __name__ == "__main__":
    _request_worker(sys.argv[1], sys.argv[2:])
