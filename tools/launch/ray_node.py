"""Ray on this node: its command and environment, its start as our own child, its end with all that it started."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hf_formats.cores import THREADS, threads_per_worker, usable_cores
from recipes.common.recipe import ROOT
from recipes.common.short_folder import SessionFolder
from tools.launch import network, nodes, output_dir
from tools.launch.job import FREE_PORT, Job
from tools.launch.processes import POLL_S, OwnProcesses, RunFailed, how_it_ended, last_lines, python_path
from tools.launch.roles import NodeRole
from verl.utils.net_utils import LOOPBACK, free_ports, ray_is_up

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
# Ray's node manager gives its agents 15 s to be up (ray-project/ray issue 65983), too few on a busy machine: what
# `ray start` then prints. It is started again for as long as a start may take.
_TOO_SLOW = "The current node timed out during startup"
NPU_ENV_FILE = ROOT / "recipes" / "common" / "npu_env.sh"
CPU_OBJECT_STORE_BYTES = 256 * 2**20
# The allocator, glibc's or jemalloc, keeps the memory of a micro-batch and of a generation for the next one (glibc:
# blocks up to its own limit of 32 MiB): taking it again, page by page, would be a fifth of an update on a CPU.
KEPT_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_CONF": "dirty_decay_ms:-1",
}
# Threads that wait for work sleep soon: for the milliseconds that GNU's OpenMP would have them spin, they take cores
# from whatever else runs, which on a laptop is a browser at least.
WAITING_THREADS = {"GOMP_SPINCOUNT": "1000"}
_EXPORT = re.compile(r'^export (\w+)="\$\{\w+:-([^}]*)\}"', re.MULTILINE)


def ray_command(
    job: Job, role: NodeRole, temp_dir: str, labels: Mapping[str, str], ports: tuple[str, str] = (FREE_PORT, FREE_PORT)
) -> tuple[str, ...]:
    """``ray start`` of one node in the foreground; ``ports`` are those of the client server and of the agent."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", role.own_addr, "--temp-dir", temp_dir]
    if role.is_head:
        command += ["--head", "--port", str(job.ray_port), "--include-dashboard", "false"]
        command += ["--ray-client-server-port", ports[0]]
    else:
        command += ["--address", ray_address(job, role)]
    command += ["--dashboard-agent-listen-port", ports[1]]
    command += ["--min-worker-port", "0", "--max-worker-port", "0"]  # any free port: its own range collides with others
    command += ["--num-cpus", str(max(usable_cores(), job.npus_per_node + 4))]
    if labels:
        command += ["--labels", ",".join(f"{name}={value}" for name, value in labels.items())]
    if job.device == "npu":
        command += ["--resources", json.dumps({"NPU": job.npus_per_node})]
    elif job.device == "cuda":
        command += ["--num-gpus", str(job.npus_per_node)]
    else:
        command += ["--object-store-memory", str(CPU_OBJECT_STORE_BYTES)]
    return tuple(command)


def ray_address(job: Job, role: NodeRole) -> str:
    """Host and port of Ray's head."""
    return f"{role.master_addr}:{job.ray_port}"


def ray_environment(job: Job, role: NodeRole) -> dict[str, str]:
    """The whole environment of Ray and of the job's commands: this process's, the run's variables, Ray's token."""
    inherited = {name: value for name, value in os.environ.items() if name.lower() != "grpc_proxy"}
    token = output_dir.shared_token(job.settings.output_dir, job.settings.ray_auth_token)
    return {**inherited, **run_variables(job, role), "RAY_AUTH_TOKEN": token}


def run_variables(job: Job, role: NodeRole) -> dict[str, str]:
    """The variables that this launcher sets for Ray, the workers and the driver; Ray's token comes on top."""
    given = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    own = ["localhost", LOOPBACK, role.master_addr, role.own_addr]
    variables = {
        "PYTHONPATH": python_path(),
        "RAY_ADDRESS": ray_address(job, role),
        "RAY_AUTH_MODE": "token",
        "RAY_COLOR_PREFIX": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        **(loss_variables(job.settings.lost_timeout_s) if job.nnodes > 1 else {}),
        "HYDRA_FULL_ERROR": "1",
        THREADS: str(threads_per_worker(job.npus_per_node)),
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": role.interface,
        "TP_SOCKET_IFNAME": role.interface,
        # Ray's gRPC would send even the node's own address to a proxy.
        "no_proxy": ",".join(dict.fromkeys(filter(None, [*given, *own]))),
    }
    variables["NO_PROXY"] = variables["no_proxy"]
    if role.own_addr == LOOPBACK:
        # Without it, Ray replaces a loopback address by the machine's outer one (ray-project/ray issue 26293), and a
        # node with an outer address listens on all interfaces.
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if job.settings.master_port is not None:
        variables["MASTER_PORT"] = str(job.settings.master_port)
    if job.device == "npu":
        variables["HCCL_SOCKET_IFNAME"] = role.interface
        variables |= npu_variables(os.environ)
    elif job.device == "cuda":
        variables["NCCL_SOCKET_IFNAME"] = role.interface
    else:
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        defaults = KEPT_MEMORY | WAITING_THREADS
        variables |= {name: os.environ.get(name) or value for name, value in defaults.items()}
    return variables


def loss_variables(lost_timeout_s: float) -> dict[str, str]:
    """Ray's own settings that make it give up a node, or a head, that has been silent for ``lost_timeout_s``.

    Two checks that a node does not answer mean that it is lost; a refused connection fails a check at once.
    """
    return {
        "RAY_health_check_initial_delay_ms": "0",
        "RAY_health_check_period_ms": f"{1000 * min(1.0, 0.05 * lost_timeout_s):.0f}",
        "RAY_health_check_timeout_ms": f"{1000 * 0.4 * lost_timeout_s:.0f}",
        "RAY_health_check_failure_threshold": "2",
        "RAY_gcs_rpc_server_reconnect_timeout_s": f"{max(1.0, lost_timeout_s):.0f}",
    }


def npu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The exports of ``npu_env.sh``, where a variable that is set already keeps its value."""
    exports = _EXPORT.findall(NPU_ENV_FILE.read_text(encoding="utf-8"))
    return {name: environment.get(name) or value for name, value in exports}


class RayNode:
    """This node's ``ray start --block``; its output goes to ``log_dir``, the folder of this attempt.

    Raises:
        RunFailed: another process has taken the head's port since the checks: Ray would die of it, and that process
            would answer in its place.
    """

    def __init__(
        self,
        job: Job,
        role: NodeRole,
        processes: OwnProcesses,
        environment: Mapping[str, str],
        log_dir: Path,
        labels: Mapping[str, str],
    ) -> None:
        assert isinstance(job.ray_port, int), "the launcher chooses it before anything starts"
        self._role = role
        if role.is_head and (problem := network.port_problem("RAY_PORT", job.ray_port)):
            raise RunFailed(problem)
        output_dir.keep_earlier_sessions(log_dir.parent, role.own_addr)
        self._folder = SessionFolder()  # not in OUTPUT_DIR, whose disk may have no sockets
        self._kept_logs = log_dir / f"ray_{role.own_addr}"
        output_dir.show_session(self._folder.path / "session_latest" / "logs", self._kept_logs)
        self.end_file = self._folder.path / "run_end.json"
        self.log_path = output_dir.start_log(log_dir, role.own_addr)
        client, agent = map(str, free_ports(2, avoid=(job.ray_port,)))
        self._command = ray_command(job, role, str(self._folder.path), labels, (client, agent))
        self._processes, self._environment = processes, {**environment, nodes.END_FILE: str(self.end_file)}
        # Other nodes may have joined one that is not up, and would lose it.
        self._gives_up_s = time.monotonic() + (START_TIMEOUT_S if job.nnodes == 1 else 0.0)
        self.log_path.write_bytes(b"")
        self._start()

    def _start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = self._processes.start(self._command, self._environment, log)

    def wait_until_up(self) -> None:
        """Wait until the head takes part; RunFailed when Ray ends first or time runs out."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ray_is_up(self.log_path):
            if (problem := self.problem()) is not None:
                raise RunFailed(problem)
            if time.monotonic() > deadline:
                raise RunFailed(f"Ray was not up within {START_TIMEOUT_S:g} s{self._tail()}")
            time.sleep(POLL_S)

    def problem(self) -> str | None:
        """How Ray on this node ended, with the last lines that it wrote; None while it runs.

        The only node's Ray is started again where it was too slow: the driver joins it when ``ray_is_up``.
        """
        status = self._process.poll()
        if status is None:
            return None
        if time.monotonic() < self._gives_up_s and _TOO_SLOW in last_lines(self.log_path, 1):
            logger.warning("Ray's own processes were not up within its limit; it is started again (%s)", self.log_path)
            self._start()
            return None
        return f"Ray on this node ({self._role.own_addr}) {how_it_ended(status)}{self._tail()}"

    def _tail(self) -> str:
        lines = last_lines(self.log_path).splitlines()
        return "".join(f"\n    {line}" for line in [f"({self.log_path}:)", *lines])

    def keep_logs(self) -> str | None:
        """Move Ray's session logs beside the run's own and remove its temporary folder; call it once Ray has ended.

        Returns what keeps them from being copied whole, such as a full disk.
        """
        problem = None
        try:
            output_dir.keep_session(self._kept_logs)
        except shutil.Error as error:  # of many files, each with its reason
            problem = str(error.args[0][0][2])
        except OSError as error:
            problem = str(error)
        self._folder.remove()
        return problem
