"""One node's part of a run, from Ray's start to the last process gone; head_run and worker_run are the two kinds."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from recipes.common.recipe import ROOT
from tools.launch import nodes, ray_node
from tools.launch.job import Job
from tools.launch.processes import OwnProcesses, RunFailed
from tools.launch.roles import NodeRole
from verl.trainer.config.load import to_yaml
from verl.trainer.main_ppo import written_folders
from verl.utils.disk_space import disk_full_line, is_disk_full

ECHO_S = 1.0  # a Ctrl-C reaches this process from the terminal, and again from the script that waits for it


class Stopped(Exception):
    """The user or the system asked this process to end; the argument is the signal."""


class NodeRun(ABC):
    """What both kinds of nodes do: run, be asked to stop, end everything that they have started."""

    waits_for: str  # what a stop waits for, while ``_may_save``

    def __init__(self, job: Job, role: NodeRole, console: Console) -> None:
        self.job, self.role, self.console = job, role, console
        self.processes = OwnProcesses()
        self.environment = ray_node.ray_environment(job, role)
        self.started = time.monotonic()
        self.ray: ray_node.RayNode | None = None
        self.stop_signal: signal.Signals | None = None  # asked for, while the step is finished and saved
        self.stop_asked_at = 0.0

    @abstractmethod
    def _work(self) -> None:
        """This node's part; RunFailed or Stopped where it does not end well."""

    @abstractmethod
    def _may_save(self) -> bool:
        """Whether there is something to save, so that a stop waits for it."""

    @abstractmethod
    def _say_end(self, status: int, reason: str) -> None:
        """Tell those who wait for this node, while its processes still run."""

    def run(self) -> int:
        """Do this node's part; returns the exit status. Whatever happens, nothing that was started stays."""
        status, reason = 1, ""
        try:
            self._work()
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
        return status

    def save_and_stop(self, number: signal.Signals) -> bool:
        """Have the step finished and saved, then end; False where there is none to wait for, or it has been asked."""
        trainer, now = self.job.config.trainer, time.monotonic()
        if self.stop_signal is not None and now < self.stop_asked_at + ECHO_S:
            return True
        if not trainer.save_on_interrupt or self.stop_signal is not None or not self._may_save():
            return False
        self.stop_signal, self.stop_asked_at = number, now
        self.print(
            f"{number.name}: waiting at most {trainer.interrupt_grace_s:g} s (trainer.interrupt_grace_s) for "
            f"{self.waits_for}; once more ends everything at once",
            "yellow",
        )
        return True

    def print(self, text: str, style: str | None = None) -> None:
        """A line on the console as it is: no markup, no line breaks."""
        with suppress(OSError):  # where the console is a file on a disk that is full, nothing can be said
            self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        return f"{minutes}:{seconds:02d} since start"

    def _start_ray(self, log_dir: Path) -> ray_node.RayNode:
        """Start Ray on this node; ``wait_until_up`` waits for the head."""
        labels: dict[str, str] = {}
        if self.job.nnodes > 1:
            labels = nodes.node_labels(to_yaml(self.job.config), ROOT, self.job.settings.node_rank)
        ray = ray_node.RayNode(self.job, self.role, self.processes, self.environment, log_dir, labels)
        self.ray = ray
        return ray

    def _end(self, status: int, reason: str) -> None:
        """End every process of ours; a second signal does not interrupt it."""
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
        self._say_end(status, reason)
        left = self.processes.end_all()
        if self.ray is not None and (problem := self.ray.keep_logs()) is not None:
            self.print(f"Ray's logs are not kept whole: {problem}", "yellow")
        if left:
            self.print(f"error: these processes of this run could not be ended: {', '.join(left)}", "bold red")

    def _check_grace(self) -> None:
        grace_s = self.job.config.trainer.interrupt_grace_s
        if self.stop_signal is not None and time.monotonic() > self.stop_asked_at + grace_s:
            raise Stopped(self.stop_signal)

    def _disk_full_line(self) -> str:
        return disk_full_line([self.job.settings.output_dir, *written_folders(self.job.config)])
