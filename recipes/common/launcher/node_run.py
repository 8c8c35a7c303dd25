"""One node's part of a run, from Ray's start to the last process gone: ``HeadRun`` on the head, else ``WorkerRun``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from rich.console import Console

from recipes.common.launcher import checks, network, nodes, ray_node, run_logs
from recipes.common.launcher.job import Job
from recipes.common.launcher.processes import POLL_S, OwnProcesses, how_it_ended
from recipes.common.launcher.settings import NodeRole
from recipes.common.launcher.stages import Stage, closing_stages, driver_stage, nodes_stage, stages
from recipes.common.launcher.training_identity import archive_other_training, training_identity
from recipes.common.recipe import ROOT
from verl.trainer.config.load import to_yaml
from verl.trainer.main_ppo import EXIT_WORKER_DIED
from verl.utils.rank_log import LOG_DIR

CAUSE_S = 3.0
HEAD_POLL_S = 1.0  # between two looks of a node at the head's port


class RunFailed(Exception):
    """The run cannot continue; the text says what died or failed."""


class Stopped(Exception):
    """The user or the system asked this process to end; the text is the signal's number."""


class NodeRun:
    """The parts that all nodes share: Ray, own processes, messages, and the end of everything that was started."""

    def __init__(self, job: Job, role: NodeRole, console: Console) -> None:
        self.job, self.role, self.console = job, role, console
        self.processes = OwnProcesses()
        token = ray_node.shared_token(job.settings.output_dir, os.environ.get("RAY_AUTH_TOKEN"))
        self.environment = {**os.environ, **ray_node.run_variables(job, role, os.environ), "RAY_AUTH_TOKEN": token}
        for name in ("grpc_proxy", "GRPC_PROXY"):
            self.environment.pop(name, None)
        self.ray: ray_node.RayNode | None = None
        self.started = time.monotonic()

    def run(self) -> int:
        """Do this node's part; returns the exit status. Whatever happens, nothing that was started stays."""
        status = 1
        try:
            self.body()
            status = 0
        except RunFailed as error:
            self.print_error(str(error))
            self.after_failure()
        except Stopped as error:
            status = 128 + int(str(error))
            self.print_error(f"stopped by {signal.Signals(int(str(error))).name}")
        finally:
            self._end(status)
        return status

    def body(self) -> None:
        """The node's work; RunFailed when it cannot be done."""
        raise NotImplementedError

    def after_failure(self) -> None:
        """Say what the user can do."""

    def before_end(self, status: int) -> None:
        """Notify other nodes of the end of the run, while Ray is still there."""

    def start_ray(self, log_dir: Path) -> None:
        """Start Ray on this node and wait until the head's port answers."""
        labels: dict[str, str] = {}
        if self.job.nnodes > 1:
            labels = nodes.node_labels(to_yaml(self.job.config), ROOT, self.job.settings.node_rank)
        try:
            self.ray = ray_node.RayNode(self.job, self.role, self.processes, self.environment, log_dir, labels)
            self.ray.wait_until_up()
        except RuntimeError as error:
            raise RunFailed(str(error)) from error

    def print(self, text: str, style: str | None = None) -> None:
        """A line on the console as it is: no markup, no line breaks."""
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def print_error(self, text: str) -> None:
        """A line that says why the run ends."""
        self.print(f"error: {text}", "bold red")

    def _end(self, status: int) -> None:
        """End every process of ours, on all nodes; a second signal does not interrupt it."""
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
        self.before_end(status)
        left = self.processes.end_all()
        if self.ray is not None:
            self.ray.keep_logs()
        if left:
            self.print_error(f"these processes of this run could not be ended: {', '.join(left)}")
        if self.role.is_head and status == 0:
            self.print(f"done in {self.elapsed()}, all processes ended", "bold green")

    def elapsed(self) -> str:
        """The time since the start, as a person reads it."""
        seconds = int(time.monotonic() - self.started)
        return f"{seconds // 60}:{seconds % 60:02d} since start"


class HeadRun(NodeRun):
    """The head: Ray, the other nodes, the stages, the training, the report."""

    def __init__(self, job: Job, role: NodeRole, console: Console) -> None:
        super().__init__(job, role, console)
        self.log_dir = run_logs.new_attempt(job.settings.log_dir)
        self.is_training = False
        self.watch: subprocess.Popen[bytes] | None = None
        self.watch_log = self.log_dir / "nodes_watch.log"
        self.reason = ""

    def body(self) -> None:
        """Nodes come before anything costly, so that a missing one is noticed in time."""
        self.print(f"logs are in {self.log_dir}")
        self.console.rule(f"[bold]Ray[/bold] ({self.elapsed()})")
        self.start_ray(self.log_dir)
        self.print(f"Ray's head is up at {ray_node.ray_address(self.job, self.role)}")
        if self.job.nnodes > 1:
            self._gather_nodes()
        for stage in stages(self.job):
            self._run_stage(stage)
        self._keep_trainings_apart()
        self._run_driver()
        for stage in closing_stages(self.job):
            self._run_stage(stage)

    def after_failure(self) -> None:
        """How to resume a training."""
        if self.is_training:
            self.print(checks.resume_hint(Path(self.job.config.trainer.default_local_dir)), "yellow")

    def print_error(self, text: str) -> None:
        """The first error is also the reason that other nodes are given."""
        self.reason = self.reason or text
        super().print_error(text)

    def before_end(self, status: int) -> None:
        """Other nodes end as soon as Ray tells them; the commands that found a node missing have done so already."""
        if self.watch is None or self.watch.poll() is not None or self.ray is None or self.ray.problem() is not None:
            return
        command = nodes_stage(self.job, "end", "--status", str(status), "--reason", self.reason).command
        with self.watch_log.open("ab") as log:
            process = self.processes.start(command, self.environment, log, ROOT)
            try:
                process.wait(timeout=2 * nodes.END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.print("the other nodes could not be notified of the end of the run", "yellow")

    def _gather_nodes(self) -> None:
        """Wait for all nodes, compare them with this one, and from then on watch them."""
        count, patience = str(self.job.nnodes), f"{self.job.settings.join_timeout_s:g}"
        self._run_stage(nodes_stage(self.job, "join", "--num-nodes", count, "--timeout-s", patience))
        with self.watch_log.open("wb") as log:
            command = nodes_stage(self.job, "watch", "--num-nodes", count).command
            self.watch = self.processes.start(command, self.environment, log, ROOT)

    def _keep_trainings_apart(self) -> None:
        """Checkpoints of another seed, data set or model must not be resumed."""
        from verl.trainer.config.data import file_list

        settings = self.job.settings
        files = [Path(name).expanduser() for name in file_list(self.job.config.data.train_files)]
        identity = training_identity(settings.seed, files, Path(self.job.config.actor_rollout_ref.model.path))
        moved_to = archive_other_training(settings.output_dir, identity)
        if moved_to is not None:
            text = f"OUTPUT_DIR held a training with another seed, data set or model: its results are now in {moved_to}"
            self.print(text, "yellow")

    def _run_stage(self, stage: Stage) -> None:
        """Run one stage to its end; RunFailed when it fails."""
        self.console.rule(f"[bold]{stage.title}[/bold] ({self.elapsed()})")
        if stage.skip_reason is not None:
            self.console.print(f"nothing to do: {stage.skip_reason}", highlight=False)
            return
        started = time.monotonic()
        pid, status, log = self._run_command(stage, self.environment)
        if status != 0:
            problem = f"stage {stage.title} (pid {pid}) {how_it_ended(status)}; its output is in {log}"
            raise RunFailed(nodes.problem_in(log) or problem)
        self.console.print(f"{stage.title} done in {time.monotonic() - started:.1f} s", style="green")

    def _run_driver(self) -> None:
        self.is_training = True
        stage = driver_stage(self.job)
        self.console.rule(f"[bold]{stage.title}[/bold] ({self.elapsed()})")
        # The driver passes settings on to the workers of all nodes; a node's interface comes from its own Ray.
        environment = {name: value for name, value in self.environment.items() if not name.endswith("_SOCKET_IFNAME")}
        pid, status, log = self._run_command(stage, {**environment, LOG_DIR: str(self.log_dir)})
        if status != 0:
            self._look_for_the_cause()
            why = " because a worker died or failed, which the lines above name" if status == EXIT_WORKER_DIED else ""
            raise RunFailed(
                f"the driver (verl.trainer.main_ppo, pid {pid}) {how_it_ended(status)}{why}; its output is in {log}, "
                f"Ray's logs will be in {self.log_dir}"
            )

    def _run_command(self, stage: Stage, environment: dict[str, str]) -> tuple[int, int, Path]:
        log = self.log_dir / f"{stage.name}.log"
        self.print(f"$ {stage.shown()}", "dim")
        output = Console(soft_wrap=True, markup=False, highlight=stage.name != "main_ppo")
        pid, status = self.processes.run(stage.command, environment, log, output, self._check)
        return pid, status, log

    def _look_for_the_cause(self) -> None:
        """Raise when a node or Ray is found to have ended too: the driver's end may be noticed a moment earlier."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            self._check()
            time.sleep(POLL_S)

    def _check(self) -> None:
        """Raise when Ray has ended or a node is lost; called while a command runs."""
        if self.ray is not None and (problem := self.ray.problem()) is not None:
            raise RunFailed(problem)
        if self.watch is not None and self.watch.poll() is not None:
            if (problem := nodes.problem_in(self.watch_log)) is not None:
                raise RunFailed(problem)
            self.watch = None  # Ray has ended under it, which the next look at Ray shows


class WorkerRun(NodeRun):
    """Any other node: it joins the head's Ray, and ends when the head says so or is lost."""

    def body(self) -> None:
        """Wait for the head, run Ray, wait for the end."""
        where = ray_node.ray_address(self.job, self.role)
        self.console.rule(f"[bold]Worker[/bold] {self.role.own_addr}, head {where}")
        self._wait_for_head(where)
        self.start_ray(run_logs.attempt_of_worker(self.job.settings.log_dir, self.role.own_addr))
        self.print("Ray is starting; the head runs the training and shows its progress")
        head, patience_s = self.role.master_addr, self.job.settings.lost_timeout_s
        answered = time.monotonic()
        while not self._has_ended():
            assert self.ray is not None
            if network.accepts_connections(head, self.job.settings.ray_port):
                answered = time.monotonic()
            elif time.monotonic() - answered > patience_s:
                raise RunFailed(f"the head {head} went away: it gave no sign of life for {patience_s:g} s")
            if (problem := self.ray.problem()) is not None and not self._has_ended():
                raise RunFailed(problem)
            time.sleep(HEAD_POLL_S)

    def _wait_for_head(self, where: str) -> None:
        patience_s = self.job.settings.head_timeout_s
        deadline = time.monotonic() + patience_s
        while not network.accepts_connections(self.role.master_addr, self.job.settings.ray_port):
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"the head {where} could not be reached within {patience_s:g} s: is the script running there, with "
                    "this MASTER_ADDR?"
                )
            time.sleep(POLL_S)

    def _has_ended(self) -> bool:
        """Whether the head has ended the run; RunFailed with the reason when it did not end well."""
        assert self.ray is not None
        if not self.ray.end_file.is_file():
            return False
        end = json.loads(self.ray.end_file.read_text(encoding="utf-8"))
        if end["status"] != 0:
            raise RunFailed(f"the head {self.role.master_addr} ended the run: {end['reason']}")
        self.print("the head says that the run is complete", "green")
        return True
