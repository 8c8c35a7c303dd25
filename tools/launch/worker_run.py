"""The part of a node that is not the head: Ray, until the head says that the run is over."""

from __future__ import annotations

import json
import time

from tools.launch import output_dir, ray_node
from tools.launch.node_run import NodeRun
from tools.launch.processes import POLL_S, RunFailed
from verl.utils.net_utils import accepts_connections

HEAD_POLL_S = 1.0  # between two looks at the head's port


class WorkerRun(NodeRun):
    """Waits for the head, runs Ray, and ends when the head says so or is lost.

    A signal to stop is the head's to act on: it gets the same one from a scheduler, or ends without this node.
    """

    waits_for = "the head"

    def _may_save(self) -> bool:
        return self.ray is not None

    def _say_end(self, status: int, reason: str) -> None:
        """Nobody waits for this node: the head notices its end."""

    def _work(self) -> None:
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
        ray = self._start_ray(output_dir.attempt_of_worker(settings.log_dir, self.role.own_addr))
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
