"""One node's part of a run, from Ray's start to the last process gone."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from recipes.common.recipe import ROOT
from tools.launch import nodes, output_dir, ray_node
from tools.launch.job import Job
from tools.launch.processes import POLL_S, OwnProcesses, RunFailed, how_it_ended, last_lines
from tools.launch.records import Records, files_of
from tools.launch.settings import NodeRole
from tools.launch.stages import Stage, closing_stages, driver_stage, nodes_stage, stages
from verl.trainer.config.data import file_list
from verl.trainer.config.load import to_yaml
from verl.trainer.main_ppo import (
    EXIT_DISK_FULL,
    EXIT_INTERRUPTED,
    EXIT_WORKER_DIED,
    HEAD_WAIT,
    how_to_continue,
    written_folders,
)
from verl.utils.disk_space import disk_full_line, has_full_disk, is_disk_full, tells_of_full_disk
from verl.utils.net_utils import accepts_connections
from verl.utils.rank_log import LOG_DIR

CAUSE_S = 3.0
MOST_WATCHES = 4  # processes that watch the nodes, one after another
ECHO_S = 1.0  # a Ctrl-C reaches this process from the terminal, and again from the script that waits for it
HEAD_POLL_S = 1.0  # between two looks of a node at the head's port


class Stopped(Exception):
    """The user or the system asked this process to end; the argument is the signal."""


class NodeRun:
    """A node's run: on the head Ray, the other nodes, the stages, the training and the report; elsewhere Ray alone."""

    def __init__(self, job: Job, role: NodeRole, console: Console) -> None:
        self.job, self.role, self.console = job, role, console
        self.processes = OwnProcesses()
        self.environment = ray_node.ray_environment(job, role)
        self.started = time.monotonic()
        self.ray: ray_node.RayNode | None = None
        self.watch: subprocess.Popen[bytes] | None = None
        self.watches_left = MOST_WATCHES
        self.others_wait = False  # whether nodes have joined and nobody has told them how the run ended
        self.driver: subprocess.Popen[bytes] | None = None
        self.stop_signal: signal.Signals | None = None  # asked for, while the step is finished and saved
        self.stop_asked_at = 0.0
        self.records = Records(job.settings.output_dir)
        if role.is_head:
            self.log_dir = output_dir.new_attempt(job.settings.log_dir)
            self.watch_log = self.log_dir / "nodes_watch.log"

    def run(self) -> int:
        """Do this node's part; returns the exit status. Whatever happens, nothing that was started stays."""
        status, reason = 1, ""
        try:
            if self.role.is_head:
                self._run_head()
            else:
                self._run_worker()
            status = 0
        except (RunFailed, OSError) as error:
            if isinstance(error, OSError) and not is_disk_full(error):
                raise
            reason = str(error) if isinstance(error, RunFailed) else self._disk_full_line()
            self.print(f"error: {reason}", "bold red")
        except Stopped as error:
            status, reason = 128 + error.args[0], f"stopped by {error.args[0].name}"
            self.print(f"error: {reason}", "bold red")
        finally:
            self._end(status, reason)
        if self.role.is_head and (status > 128 or (status and self.driver is not None)):
            self.print(how_to_continue(self.job.config.trainer.default_local_dir), "yellow")
        return status

    def save_and_stop(self, number: signal.Signals) -> bool:
        """Have the driver finish its step, save it and end; False where there is none to ask, or it has been asked.

        Nodes that only run Ray wait for the head, which gets the same signal from a scheduler or ends without them.
        """
        trainer, now = self.job.config.trainer, time.monotonic()
        if self.stop_signal is not None and now < self.stop_asked_at + ECHO_S:
            return True
        is_running = self.driver is not None and self.driver.poll() is None
        if not trainer.save_on_interrupt or self.stop_signal is not None or not (is_running or self._serves_ray):
            return False
        self.stop_signal, self.stop_asked_at = number, now
        if is_running and self.driver is not None:
            self.driver.send_signal(signal.SIGTERM)  # also where Python loads modules, which may swallow an interrupt
        self.print(
            f"{number.name}: waiting at most {trainer.interrupt_grace_s:g} s (trainer.interrupt_grace_s) for "
            f"{'the step and its checkpoint' if is_running else 'the head'}; once more ends everything at once",
            "yellow",
        )
        return True

    @property
    def _serves_ray(self) -> bool:
        return not self.role.is_head and self.ray is not None

    def print(self, text: str, style: str | None = None) -> None:
        """A line on the console as it is: no markup, no line breaks."""
        with suppress(OSError):  # where the console is a file on a disk that is full, nothing can be said
            self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        return f"{minutes}:{seconds:02d} since start"

    def _title(self, title: str) -> None:
        self.console.rule(f"[bold]{title}[/bold] ({self._elapsed()})")

    def _start_ray(self) -> ray_node.RayNode:
        """Start Ray on this node; ``wait_until_up`` waits for the head."""
        labels: dict[str, str] = {}
        if self.job.nnodes > 1:
            labels = nodes.node_labels(to_yaml(self.job.config), ROOT, self.job.settings.node_rank)
        ray = ray_node.RayNode(self.job, self.role, self.processes, self.environment, self.log_dir, labels)
        self.ray = ray
        return ray

    def _end(self, status: int, reason: str) -> None:
        """End every process of ours, on all nodes; a second signal does not interrupt it."""
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
        # Where the watch has found a lost node, it has notified the others; without Ray they notice it themselves.
        if self.others_wait and self.ray is not None and self.ray.problem() is None:
            self._notify_other_nodes(status, reason)
        left = self.processes.end_all()
        if self.ray is not None and (problem := self.ray.keep_logs()) is not None:
            self.print(f"Ray's logs are not kept whole: {problem}", "yellow")
        if left:
            self.print(f"error: these processes of this run could not be ended: {', '.join(left)}", "bold red")
        if self.role.is_head and status == 0:
            self.print(f"done in {self._elapsed()}, all processes ended", "bold green")

    def _notify_other_nodes(self, status: int, reason: str) -> None:
        command = nodes_stage("end", "--status", str(status), "--reason", reason).command
        with self.watch_log.open("ab") as log:
            process = self.processes.start(command, self.environment, log)
        try:
            is_done = process.wait(timeout=2 * nodes.END_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            is_done = False
        if not is_done:
            self.print("the other nodes could not be notified of the end of the run", "yellow")

    # The head

    def _run_head(self) -> None:
        """The whole job; nodes come before anything costly, so that a missing one is noticed in time.

        On one node Ray starts beside the stages and the driver's imports: the driver waits until the head answers.
        """
        self.print(f"logs are in {self.log_dir}")
        self._title("Ray")
        ray = self._start_ray()
        if self.job.nnodes > 1:
            ray.wait_until_up()
            self._gather_nodes()
        self.print(f"Ray's head is at {ray_node.ray_address(self.job, self.role)}")
        for stage in stages(self.job):
            self._run_unless_made(stage)
        self._keep_trainings_apart()
        self._run_driver()
        for stage in closing_stages(self.job):
            self._run_stage(stage)

    def _gather_nodes(self) -> None:
        """Wait for all nodes, compare them with this one, and from then on watch them."""
        count, patience = str(self.job.nnodes), f"{self.job.settings.join_timeout_s:g}"
        self._run_stage(nodes_stage("join", "--num-nodes", count, "--timeout-s", patience))
        self.others_wait = True
        self._start_watch()

    def _start_watch(self) -> None:
        self.watches_left -= 1
        with self.watch_log.open("ab") as log:
            command = nodes_stage("watch", "--num-nodes", str(self.job.nnodes)).command
            self.watch = self.processes.start(command, self.environment, log)

    def _keep_trainings_apart(self) -> None:
        """Checkpoints of another seed, data set or model must not be resumed."""
        settings, config = self.job.settings, self.job.config
        files = [Path(name).expanduser() for name in file_list(config.data.train_files)]
        identity = output_dir.training_identity(settings.seed, files, Path(config.actor_rollout_ref.model.path))
        try:
            moved_to = output_dir.archive_other_training(settings.output_dir, identity)
        except OSError as error:  # one of them is a mount, or the disk is full
            if is_disk_full(error):
                raise
            raise RunFailed(
                f"OUTPUT_DIR holds a training with another seed, data set or model, and {error.filename} cannot be "
                f"moved into {output_dir.EARLIER} ({error.strerror}): choose another OUTPUT_DIR"
            ) from error
        if moved_to is not None:
            text = f"OUTPUT_DIR held a training with another seed, data set or model: its results are now in {moved_to}"
            self.print(text, "yellow")

    def _run_unless_made(self, stage: Stage) -> None:
        """Run one stage, unless the same command has run and nothing that it names has changed since.

        The command would say the same, once it has loaded what it needs for that, which takes seconds.
        """
        if stage.skip_reason is None and self.records.find(stage.name, stage.command, files_of(stage.command)):
            stage = replace(stage, skip_reason="the same command has made it, and no file has changed since")
        self._run_stage(stage)
        if stage.skip_reason is None:
            self.records.write(stage.name, True, stage.command, files_of(stage.command))

    def _run_stage(self, stage: Stage) -> None:
        """Run one stage to its end; RunFailed when it fails, or a line that says why where it is optional."""
        self._title(stage.title)
        if stage.skip_reason is not None:
            self.console.print(f"nothing to do: {stage.skip_reason}", highlight=False)
            return
        started = time.monotonic()
        pid, status, log = self._run_command(stage, self.environment)
        if status != 0:
            is_full = has_full_disk(written_folders(self.job.config)) or tells_of_full_disk(last_lines(log))
            problem = f"stage {stage.title} (pid {pid}) {how_it_ended(status)}; its output is in {log}"
            if stage.is_optional:
                why = self._disk_full_line() if is_full else last_lines(log, 1) or "it printed nothing"
                self.print(f"{problem}. The training is complete, only this is not: {why}", "yellow")
                return
            raise RunFailed(self._disk_full_line() if is_full else nodes.problem_in(log) or problem)
        self.console.print(f"{stage.title} done in {time.monotonic() - started:.1f} s", style="green")

    def _run_driver(self) -> None:
        stage = driver_stage(self.job)
        self._title(stage.title)
        # The driver passes settings on to the workers of all nodes; a node's interface comes from its own Ray.
        environment = {name: value for name, value in self.environment.items() if not name.endswith("_SOCKET_IFNAME")}
        environment |= {LOG_DIR: str(self.log_dir), HEAD_WAIT: str(ray_node.START_TIMEOUT_S)}
        pid, status, log = self._run_command(stage, environment, self._set_driver)
        if status == 0:
            return
        if status == EXIT_INTERRUPTED or (self.stop_signal and status not in (EXIT_DISK_FULL, EXIT_WORKER_DIED)):
            raise Stopped(self.stop_signal or signal.SIGINT)
        if status == EXIT_DISK_FULL or has_full_disk(written_folders(self.job.config)):
            raise RunFailed(self._disk_full_line())
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:  # the end of a node or of Ray may be noticed a moment after the driver's
            self._check()
            time.sleep(POLL_S)
        why = " because a worker died or failed, which the lines above name" if status == EXIT_WORKER_DIED else ""
        raise RunFailed(
            f"the driver (verl.trainer.main_ppo, pid {pid}) {how_it_ended(status)}{why}; its output is in {log}, "
            f"Ray's logs will be in {self.log_dir}"
        )

    def _disk_full_line(self) -> str:
        return disk_full_line([self.job.settings.output_dir, *written_folders(self.job.config)])

    def _set_driver(self, process: subprocess.Popen[bytes]) -> None:
        self.driver = process

    def _run_command(
        self,
        stage: Stage,
        environment: dict[str, str],
        on_start: Callable[[subprocess.Popen[bytes]], None] | None = None,
    ) -> tuple[int, int, Path]:
        log = self.log_dir / f"{stage.name}.log"
        self.print(f"$ {stage.shown()}", "dim")
        output = Console(soft_wrap=True, markup=False, highlight=stage.name != "main_ppo")
        return *self.processes.run(stage.command, environment, log, output, self._check, on_start), log

    def _check(self) -> None:
        """RunFailed when Ray has ended or a node is lost, Stopped after the grace; called while a command runs."""
        self._check_grace()
        if self.ray is not None and (problem := self.ray.problem()) is not None:
            raise RunFailed(problem)
        if self.watch is not None and (status := self.watch.poll()) is not None:
            if (problem := nodes.problem_in(self.watch_log)) is not None:
                self.others_wait = False
                raise RunFailed(problem)
            self._replace_watch(how_it_ended(status))

    def _replace_watch(self, how: str) -> None:
        """Go on without the process that watched the nodes: a healthy training does not end with it.

        Where Ray has ended under it, the next look at Ray shows that.
        """
        self.watch = None
        what = f"the process that watches the nodes {how} ({self.watch_log})"
        if self.watches_left > 0:
            self.print(f"{what}: another one is started", "yellow")
            self._start_watch()
        else:
            self.print(f"{what}, as others before: a lost node now shows when a worker on it is missed", "yellow")

    def _check_grace(self) -> None:
        grace_s = self.job.config.trainer.interrupt_grace_s
        if self.stop_signal is not None and time.monotonic() > self.stop_asked_at + grace_s:
            raise Stopped(self.stop_signal)

    # Any other node

    def _run_worker(self) -> None:
        """Wait for the head, run Ray, and end when the head says so or is lost."""
        head, where = self.role.master_addr, ray_node.ray_address(self.job, self.role)
        port, settings = int(self.job.ray_port), self.job.settings
        self.console.rule(f"[bold]Worker[/bold] {self.role.own_addr}, head {where}")
        deadline = time.monotonic() + settings.head_timeout_s
        while not accepts_connections(head, port):
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"the head {where} could not be reached within {settings.head_timeout_s:g} s: is the script "
                    "running there, with this MASTER_ADDR?"
                )
            time.sleep(POLL_S)
        self.log_dir = output_dir.attempt_of_worker(settings.log_dir, self.role.own_addr)
        ray = self._start_ray()
        ray.wait_until_up()
        self.print("Ray is starting; the head runs the training and shows its progress")
        answered = time.monotonic()
        while not self._has_ended(ray):
            self._check_grace()
            if accepts_connections(head, port):
                answered = time.monotonic()
            elif time.monotonic() - answered > settings.lost_timeout_s:
                raise RunFailed(f"the head {head} went away: it gave no sign of life for {settings.lost_timeout_s:g} s")
            if (problem := ray.problem()) is not None and not self._has_ended(ray):
                raise RunFailed(problem)
            time.sleep(HEAD_POLL_S)

    def _has_ended(self, ray: ray_node.RayNode) -> bool:
        """Whether the head has ended the run; RunFailed with the reason when it did not end well."""
        if not ray.end_file.is_file():
            return False
        end = json.loads(ray.end_file.read_text(encoding="utf-8"))
        if end["status"] != 0:
            raise RunFailed(f"the head {self.role.master_addr} ended the run: {end['reason']}")
        self.print("the head says that the run is complete", "green")
        return True
