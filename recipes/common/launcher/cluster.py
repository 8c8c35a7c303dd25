"""Ray on this node: started as our own child, waited for with a deadline, ended with all it started."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from recipes.common.launcher import network, run_logs
from recipes.common.launcher.job import Job, RayPorts, ray_command
from recipes.common.launcher.processes import OwnProcesses, how_it_ended
from recipes.common.launcher.settings import Place
from recipes.common.recipe import ROOT
from verl.utils.net_utils import free_ports

START_TIMEOUT_S = 90.0
LOG_TAIL_LINES = 15
TEMP_PREFIX = "rl_"


class RayNode:
    """This node's ``ray start --block``: head or worker; what it says goes to ``log_dir``, this attempt's folder.

    Raises:
        RuntimeError: somebody has taken the head's port since the checks: Ray would die of it, and they would answer.
    """

    def __init__(
        self, job: Job, place: Place, processes: OwnProcesses, environment: Mapping[str, str], log_dir: Path
    ) -> None:
        self._place, self._port = place, job.settings.ray_port
        if place.is_head and (problem := network.port_problem("RAY_PORT", self._port)):
            raise RuntimeError(problem)
        run_logs.keep_earlier_sessions(log_dir.parent, place.own_addr)
        # Ray's sockets lie below it and may be 107 characters long, so it cannot be in OUTPUT_DIR.
        _remove_leftovers(Path(tempfile.gettempdir()))
        self._temp_dir = Path(tempfile.mkdtemp(prefix=f"{TEMP_PREFIX}{os.getpid()}_"))
        self._kept_logs = log_dir / f"ray_{place.own_addr}"
        run_logs.show_session(self._temp_dir / "session_latest" / "logs", self._kept_logs)
        self.log_path = log_dir / f"ray_start_{place.own_addr}.log"
        client, dashboard, agent = free_ports(3, avoid=(job.settings.ray_port, job.settings.control_port))
        command = ray_command(job, place, str(self._temp_dir), RayPorts(client, dashboard, agent))
        with self.log_path.open("wb") as log:
            self._process: subprocess.Popen[bytes] = processes.start(command, environment, log, ROOT)

    def wait_until_up(self, check: Callable[[], None]) -> None:
        """Wait until the head's port answers; RuntimeError when Ray ends first or time runs out."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not network.accepts_connections(self._place.master_addr, self._port):
            check()
            ended = self.ended()
            if ended is not None:
                raise RuntimeError(ended)
            if time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not answer on port {self._port} within {START_TIMEOUT_S:g} s{self.tail()}")
            time.sleep(0.2)

    def ended(self) -> str | None:
        """How Ray on this node ended, with the last lines that it wrote; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        return f"Ray on this node ({self._place.own_addr}) {how_it_ended(status)}{self.tail()}"

    def tail(self) -> str:
        """The end of Ray's own output, for a message."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "".join(f"\n    {line}" for line in [f"({self.log_path}:)", *lines])

    def keep_logs(self) -> None:
        """Move Ray's session logs beside the run's own and remove its temporary folder; call it once Ray has ended."""
        run_logs.keep_session(self._kept_logs)
        shutil.rmtree(self._temp_dir, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    """Temporary folders of launchers that were killed: theirs by name, of this user, and no such process any more."""
    for path in parent.glob(f"{TEMP_PREFIX}*_*"):
        pid = path.name.removeprefix(TEMP_PREFIX).split("_")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and path.stat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def shared_token(output_dir: Path, given: str | None) -> str:
    """Ray's token: the given one, else that of ``OUTPUT_DIR/.ray_auth_token``, made by whichever node comes first."""
    if given:
        return given
    path = output_dir / ".ray_auth_token"
    output_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        mine = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
        with open(mine, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as handle:
            handle.write(secrets.token_hex(32))
            handle.flush()
            os.fsync(handle.fileno())
        try:
            os.link(mine, path)  # unlike a rename it never replaces the token that another node has just made
        except FileExistsError:
            pass
        finally:
            mine.unlink()
    return path.read_text(encoding="utf-8").strip()
