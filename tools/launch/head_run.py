"""The head's part of a run: Ray, the other nodes, the stages, the training and the report."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from tools.launch import nodes, output_dir, ray_node
from tools.launch.job import Job
from tools.launch.node_run import NodeRun, Stopped
from tools.launch.processes import POLL_S, OnStart, RunFailed, how_it_ended, last_lines
from tools.launch.records import Records, files_of
from tools.launch.roles import NodeRole
from tools.launch.serve_lines import serve_lines
from tools.launch.stages import Stage, closing_stages, driver_stage, live_stage, nodes_stage, stages
from verl.trainer.config.data import file_list
from verl.trainer.main_ppo import (
    EXIT_DISK_FULL,
    EXIT_INTERRUPTED,
    EXIT_WORKER_DIED,
    HEAD_LOG,
    HEAD_WAIT,
    how_to_continue,
    written_folders,
)
from verl.utils.disk_space import has_full_disk, is_disk_full, tells_of_full_disk
from verl.utils.net_utils import LOOPBACK
from verl.utils.rank_log import LOG_DIR

CAUSE_S = 3.0  # how long the end of a node or of Ray may be noticed after the driver's
MOST_WATCHES = 4  # processes that watch the nodes, one after another


class HeadRun(NodeRun):
    """The whole job; nodes come before anything costly, so that a missing one is noticed in time.

    On one node Ray starts beside the stages and the driver's imports: the driver waits until the head answers.
    """

    waits_for = "the step and its checkpoint"

    def __init__(self, job: Job, role: NodeRole, console: Console) -> None:
        super().__init__(job, role, console)
        self.log_dir = output_dir.new_attempt(job.settings.log_dir)
        self.watch_log = self.log_dir / "nodes_watch.log"
        self.watch: subprocess.Popen[bytes] | None = None
        self.watches_left = MOST_WATCHES
        self.others_wait = False  # whether nodes have joined and nobody has told them how the run ended
        self.driver: subprocess.Popen[bytes] | None = None
        self.live: subprocess.Popen[bytes] | None = None
        self.live_log = self.log_dir / "live_report.log"
        self.records = Records(job.settings.output_dir)

    def run(self) -> int:
        """As every node's, and at the end how to continue."""
        status = super().run()
        if status == 0:
            self.print(f"done in {self._elapsed()}, all processes ended", "bold green")
            for line in serve_lines(self.job):
                self.print(line)
        elif status > 128 or self.driver is not None:
            self.print(how_to_continue(self.job.config.trainer.default_local_dir), "yellow")
        return status

    def save_and_stop(self, number: signal.Signals) -> bool:
        """Also ask the driver, once."""
        was_asked = self.stop_signal is not None
        is_waiting = super().save_and_stop(number)
        if is_waiting and not was_asked and self.driver is not None:
            self.driver.send_signal(signal.SIGTERM)  # also where Python loads modules, which may swallow an interrupt
        return is_waiting

    def _may_save(self) -> bool:
        return self.driver is not None and self.driver.poll() is None

    def _say_end(self, status: int, reason: str) -> None:
        # Where the watch has found a lost node, it has notified the others; without Ray they notice it themselves.
        if self.others_wait and self.ray is not None and self.ray.problem() is None:
            self._notify_other_nodes(status, reason)

    def _title(self, title: str) -> None:
        self.console.rule(f"[bold]{title}[/bold] ({self._elapsed()})")

    def _work(self) -> None:
        self.print(f"logs are in {self.log_dir}")
        self._title("Ray")
        ray = self._start_ray(self.log_dir)
        if self.job.nnodes > 1:
            ray.wait_until_up()
            self._gather_nodes()
        self.print(f"Ray's head is at {ray_node.ray_address(self.job, self.role)}")
        for stage in stages(self.job):
            self._run_unless_made(stage)
        self._keep_trainings_apart()
        self._start_live_report()
        self._run_driver()
        for stage in closing_stages(self.job):
            self._run_stage(stage)

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

    def _start_live_report(self) -> None:
        if port := self.job.config.trainer.live_report:
            with self.live_log.open("ab") as log:
                self.live = self.processes.start(live_stage(self.job, port).command, self.environment, log)
            self.print(f"live report: http://{LOOPBACK}:{port}/", "bold")

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
        assert self.ray is not None, "it starts before the stages"
        head = {HEAD_LOG: str(self.ray.log_path), HEAD_WAIT: str(ray_node.START_TIMEOUT_S)}
        environment |= {LOG_DIR: str(self.log_dir), **head}
        pid, status, log = self._run_command(stage, environment, partial(setattr, self, "driver"))
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

    def _run_command(
        self, stage: Stage, environment: dict[str, str], on_start: OnStart = lambda process: None
    ) -> tuple[int, int, Path]:
        log = self.log_dir / f"{stage.name}.log"
        self.print(f"$ {stage.shown()}", "dim")
        output = Console(soft_wrap=True, markup=False, highlight=stage.name != "main_ppo")
        return *self.processes.run(stage.command, environment, log, output, self._check, on_start), log

    def _check(self) -> None:
        """RunFailed when Ray has ended or a node is lost, Stopped after the grace; called while a command runs."""
        self._check_grace()
        if self.live is not None and (status := self.live.poll()) is not None:
            why = last_lines(self.live_log, 1)
            self.print(f"the live report {how_it_ended(status)}, and the run goes on without it: {why}", "yellow")
            self.live = None
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
