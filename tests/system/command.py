"""The user's command as a test runs it: started, watched, struck, and always cleared away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from socket import SOCK_DGRAM
from types import TracebackType
from typing import Any

import psutil

from hf_formats import parent_death
from recipes.common.recipe import ROOT, load_recipe, recipe_names
from tests.pages import users_environment
from tools.launch.settings import variables
from verl.utils.net_utils import free_ports

TAG_NAME = "R1_ZERO_TEST_COMMAND"
# Machines that run tests may be busy, so only what an issue promises has a tight limit; this one is a safety net.
PATIENCE_S = 900.0
POLL_S = 0.05


class Command:
    """A user's run of a recipe's script in a session of its own; leaving the ``with`` ends whatever is left of it.

    The variables that CI sets (one thread per process) are left out.

    Args:
        output: file for what the command says.
        environment: the variables that the user sets.
        arguments: Hydra overrides.
        prefix: a command to run it under, such as ``ip netns exec NAME``.
        recipe: whose script.
        script: a script of the recipe other than its main one.
    """

    def __init__(
        self,
        output: Path,
        environment: Mapping[str, object],
        arguments: Sequence[str] = (),
        prefix: Sequence[str] = (),
        recipe: str = "r1_zero",
        script: str | None = None,
    ) -> None:
        self.output = output
        self.tag = uuid.uuid4().hex
        output.parent.mkdir(parents=True, exist_ok=True)
        path = str(ROOT / "recipes" / recipe / (script or load_recipe(recipe).script))
        with output.open("wb") as stream:
            self._process = subprocess.Popen(
                # parent_death.py: a pytest that is killed takes the command with it
                [sys.executable, parent_death.__file__, str(os.getpid()), *prefix, "bash", path, *arguments],
                env=clean_environment()
                | {name: str(value) for name, value in environment.items()}
                | {TAG_NAME: self.tag},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def text(self) -> str:
        """The output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Exit status; AssertionError with the last lines when it takes longer."""
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.tail()}") from None

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait until ``condition`` gives something true, and return it; the command must not end before that."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert self._process.poll() is None, f"ended before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s:\n{self.tail()}"
            time.sleep(POLL_S)
        return found

    def tail(self, lines: int = 40) -> str:
        """The end of the output, for a message."""
        return "\n".join(self.text().splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """All that lives of this command, whoever adopted it: every process inherits the tag."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(TAG_NAME) == self.tag and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # ended meanwhile, or somebody else's
        return found

    def open_listeners(self) -> list[str]:
        """Every socket of it that other machines could reach: command line and address; empty is good on one node."""
        found = []
        for process in self.processes():
            try:
                sockets, line = process.net_connections("inet"), " ".join(process.cmdline())[:100]
            except psutil.NoSuchProcess:
                continue
            for socket in sockets:
                is_server = socket.status == psutil.CONN_LISTEN or (socket.type == SOCK_DGRAM and not socket.raddr)
                if is_server and not ip_address(socket.laddr.ip.removeprefix("::ffff:")).is_loopback:
                    found.append(f"{line}: {socket.laddr.ip}:{socket.laddr.port}")
        return found

    def find(self, name: str, variables: Mapping[str, str] | None = None) -> psutil.Process | None:
        """The process with ``name`` in its command line and ``variables`` in its environment; None if there is none."""
        for process in self.processes():
            try:
                line, environment = " ".join(process.cmdline()), process.environ()
            except psutil.NoSuchProcess:
                continue
            # parent_death.py will become the command that follows it; bash is the script around the launcher
            is_itself = "hf_formats/parent_death.py" not in line and not line.startswith("bash ")
            wanted = (variables or {}).items()
            if name in line and is_itself and all(environment.get(key) == value for key, value in wanted):
                return process
        return None

    def worker(self, rank: int) -> psutil.Process | None:
        """The process of one worker rank; None while there is none."""
        return self.find("ray::WorkerProcess", {"RANK": str(rank)})

    def driver(self) -> psutil.Process | None:
        """The process of ``verl.trainer.main_ppo``; None while there is none."""
        return self.find("-m verl.trainer.main_ppo")

    def is_training(self) -> bool:
        """Whether the driver has printed what it resumes from, or that it starts from the weights."""
        return any(text in self.text() for text in ("resumed after step", "starting from the model's weights"))

    def left_behind(self) -> list[str]:
        """Command lines of what lives although the command has ended; empty is good."""
        found = []
        for process in self.processes():
            try:
                found.append(f"pid {process.pid}: {' '.join(process.cmdline())[:150]}")
            except psutil.NoSuchProcess:
                continue
        return found

    def end(self) -> None:
        """SIGKILL to all of it."""
        while self._process.poll() is None or self.processes():
            for process in self.processes():
                try:
                    process.send_signal(signal.SIGKILL)  # psutil looks at the start time first: a reused pid is safe
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.05)


def clean_environment() -> dict[str, str]:
    """Return a user's variables without settings of runs and proxies, and with this Python for the command."""
    dropped = {
        *(name for recipe in recipe_names() for name in variables(load_recipe(recipe))),
        "RAY_ADDRESS",
        "RAY_AUTH_MODE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "MASTER_PORT",
    }
    passed_on = {name: value for name, value in users_environment().items() if name.upper() not in dropped}
    return passed_on | {"SETUP": "no", "VENV_DIR": sys.prefix, "RAY_PORT": str(free_ports(1)[0]), "COLUMNS": "120"}


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """``metrics.jsonl`` of a run, one dict per step."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def without_measurements(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """What must be the same in two runs of one job: everything but times, throughput and memory."""
    left_out = ("timing_", "perf/", "memory/")
    return [{name: value for name, value in step.items() if not name.startswith(left_out)} for step in metrics]


def newest_step(run_dir: Path) -> int:
    """The step that ``latest`` names; 0 when there is no checkpoint yet."""
    path = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.is_file() else 0
