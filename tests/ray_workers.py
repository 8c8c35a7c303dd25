"""A Ray whose workers are forked with torch and the engines imported: importing them takes a worker four seconds.

The server of ``tests/parallel/launcher.py`` forks them. All else is Ray's own: Ray starts a worker by a command, and
the command that it is given here, this file as a program, asks the process of the test for the fork. The worker gets
the arguments and the environment of the command. Ray itself is imported after the fork; it reads the environment then.

Where the process of the test starts Ray itself, this file also takes the place of Ray's ``setup_worker.py``, which
imports Ray before it runs the command. A node that is started with ``LEAN`` has no autoscaler and nobody who reads its
logs.
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

SOCKET = "R1_ZERO_TEST_RAY_WORKERS"
LEAN = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}


@contextmanager
def ray_with_forked_workers(
    num_cpus: int, resources: dict[str, float] | None = None, **settings: Any
) -> Iterator[None]:
    """Start Ray on this machine with ``settings`` of ``ray.init``; it and its workers have ended when this returns."""
    import ray

    with lean_cluster(num_cpus, resources) as address:
        try:
            ray.init(address, log_to_driver=False, **settings)
            yield
        finally:
            ray.shutdown()


@contextmanager
def lean_cluster(num_cpus: int, resources: dict[str, float] | None = None) -> Iterator[str]:
    """The address of a Ray with one node and forked workers, for drivers that join it and leave it."""
    from ray.cluster_utils import Cluster

    with forked_workers():
        cluster = Cluster(True, head_node_args={**LEAN, "num_cpus": num_cpus, "resources": resources or {}})
        try:
            yield cluster.address
        finally:
            cluster.shutdown()


@contextmanager
def forked_workers() -> Iterator[None]:
    """Have this process fork the workers of every Ray that it starts, and of every job, before the context ends."""
    import pytest

    with tempfile.TemporaryDirectory(prefix="ray-workers-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        thread = threading.Thread(target=_fork_workers, args=(listener,), daemon=True)
        thread.start()
        runtime_env = {"py_executable": f"{sys.executable} -I -S {os.path.abspath(__file__)} {folder}/socket"}
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ray._private.ray_constants.SETUP_WORKER_FILENAME", os.path.abspath(__file__))
                patch.setenv(SOCKET, f"{folder}/socket")
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


def _set_up_worker(arguments: list[str]) -> None:
    """Set what the worker's runtime environment names, which follows a flag, and have it forked."""
    flags = ("--serialized-runtime-env-context=", "--language=")
    context = json.loads(next((a.removeprefix(flags[0]) for a in arguments if a.startswith(flags[0])), "") or "{}")
    os.environ.update({key: os.path.expandvars(value) for key, value in context.get("env_vars", {}).items()})
    _request_worker(os.environ[SOCKET], [argument for argument in arguments if not argument.startswith(flags)])


if __name__ == "__main__":
    if sys.argv[1].endswith(".py"):  # in the place of setup_worker.py; else of Python, with the socket first
        _set_up_worker(sys.argv[1:])
    else:
        _request_worker(sys.argv[1], sys.argv[2:])
