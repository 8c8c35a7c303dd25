"""``python -m recipes.common.launch RECIPE ...``: a recipe's whole job on this node, from the checks to the report."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from recipes.common.launcher import checks, cluster, hosts, network, plan, run_logs
from recipes.common.launcher.child import end_with_parent
from recipes.common.launcher.earlier import set_aside_other_training, training_identity
from recipes.common.launcher.first_plan import first_plan
from recipes.common.launcher.job import (
    Job,
    Stage,
    closing_stages,
    driver_stage,
    ray_nodes_command,
    resolve_config,
    run_variables,
    stages,
)
from recipes.common.launcher.processes import OwnProcesses, how_it_ended
from recipes.common.launcher.rendezvous import Channel, Head, NodeHello, join_head
from recipes.common.launcher.settings import Place, Settings, find_accelerator, find_place, read_settings, variables
from recipes.common.launcher.stream import POLL_S, run_streaming
from recipes.common.recipe import Recipe, load_recipe, recipe_names
from verl.trainer.main_ppo import EXIT_WORKER_DIED
from verl.utils.rank_log import LOG_DIR

SCRIPT_PID = "RECIPE_SCRIPT_PID"  # set by start.sh: its own process id
BAD_INPUT = 2
CAUSE_S = 2.0


class RunFailed(Exception):
    """The run cannot go on; the text says what died or failed."""


class Stopped(Exception):
    """The user or the system asked this process to end."""


class Launch:
    """One node's part of a run, from the first stage to the last process gone."""

    def __init__(self, job: Job, place: Place, console: Console) -> None:
        self.job, self.place, self.console = job, place, console
        self.processes = OwnProcesses()
        self.token = cluster.shared_token(job.settings.output_dir, os.environ.get("RAY_AUTH_TOKEN"))
        self.environment = {**os.environ, **run_variables(job, place, os.environ), "RAY_AUTH_TOKEN": self.token}
        for name in ("grpc_proxy", "GRPC_PROXY"):
            self.environment.pop(name, None)
        self.head: Head | None = None
        self.ray: cluster.RayNode | None = None
        # This attempt's folder; the head says which one that is, so that other nodes learn it only later.
        self.log_dir = run_logs.new_attempt(job.settings.log_dir) if place.is_head else job.settings.log_dir
        self.started = time.monotonic()
        self.is_training = False

    def run(self) -> int:
        """Do this node's part; returns the exit status. Whatever happens, nothing that was started stays."""
        status = 1
        try:
            status = self._run_head() if self.place.is_head else self._run_worker()
        except RunFailed as error:
            self._complain(str(error))
            if self.is_training:
                hint = checks.resume_hint(Path(self.job.config.trainer.default_local_dir))
                self.console.print(hint, style="yellow", highlight=False, markup=False, soft_wrap=True)
        except Stopped as error:
            status = 128 + int(str(error))
            self._complain(f"stopped by {signal.Signals(int(str(error))).name}")
        finally:
            self._end(status)
        return status

    def _run_head(self) -> int:
        self.console.print(f"logs are in {self.log_dir}", highlight=False, markup=False, soft_wrap=True)
        if self.job.nnodes > 1:
            self._gather_nodes()
        for stage in stages(self.job):
            self._run_stage(stage)
        self._keep_trainings_apart()
        self._start_ray()
        self._run_driver()
        for stage in closing_stages(self.job):
            self._run_stage(stage)
        return 0

    def _keep_trainings_apart(self) -> None:
        """Checkpoints of another seed, data set or model must not be gone on from."""
        from verl.trainer.config.data import file_list

        settings = self.job.settings
        files = [Path(name).expanduser() for name in file_list(self.job.config.data.train_files)]
        identity = training_identity(settings.seed, files, Path(self.job.config.actor_rollout_ref.model.path))
        moved_to = set_aside_other_training(settings.output_dir, identity)
        if moved_to is not None:
            text = f"OUTPUT_DIR held a training with another seed, data set or model: its results are now in {moved_to}"
            self.console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def _gather_nodes(self) -> None:
        """Wait for the launchers of all other nodes before anything costly begins."""
        settings, count = self.job.settings, self.job.nnodes - 1
        self.console.rule(f"[bold]Nodes[/bold]: waiting for {count} more, up to {settings.join_timeout_s:g} s")
        digest = config_digest(self.job)
        self.head = Head(self.place.own_addr, settings.control_port, self.token, digest, settings.lost_timeout_s)
        if self.head.wait_for(count, settings.join_timeout_s):
            for hello in self.head.nodes():
                self.console.print(f"{hello.name()} joined")
            return
        problem = self.head.problem()
        if problem is not None:
            raise RunFailed(problem)
        raise RunFailed(self._missing_nodes(self.head.nodes()))

    def _missing_nodes(self, joined: list[NodeHello]) -> str:
        ranks = {hello.node_rank for hello in joined}
        text = (
            f"{len(joined) + 1} of {self.job.nnodes} nodes were there after {self.job.settings.join_timeout_s:g} s: "
            f"{self.place.own_addr} (this head){''.join(f', {hello.name()}' for hello in joined)}"
        )
        if None not in ranks:
            missing = [f"node {rank}" for rank in range(1, self.job.nnodes) if rank not in ranks]
            text += f"; missing: {', '.join(missing)}"
        else:
            text += f"; missing: {self.job.nnodes - 1 - len(joined)} (give NODE_RANK on every node to have them named)"
        port = self.job.settings.control_port
        return (
            text + f". Start the same script there with MASTER_ADDR={self.place.master_addr} (port {port} must be open)"
        )

    def _run_stage(self, stage: Stage) -> None:
        """Run one stage to its end; RunFailed when it does not end well."""
        self.console.rule(f"[bold]{stage.title}[/bold] ({self._elapsed()})")
        if stage.why_not is not None:
            self.console.print(f"nothing to do: {stage.why_not}", highlight=False)
            return
        begun = time.monotonic()
        log = self.log_dir / f"{stage.name}.log"
        self.console.print(f"$ {stage.shown()}", style="dim", highlight=False, markup=False, soft_wrap=True)
        pid, status = run_streaming(
            self.processes, stage.command, self.environment, log, Console(soft_wrap=True, markup=False), self._check
        )
        if status != 0:
            raise RunFailed(f"stage {stage.title} (pid {pid}) {how_it_ended(status)}; its output is in {log}")
        self.console.print(f"{stage.title} done in {time.monotonic() - begun:.1f} s", style="green")

    def _start_ray(self) -> None:
        self.console.rule(f"[bold]Ray[/bold] ({self._elapsed()})")
        try:
            self.ray = cluster.RayNode(self.job, self.place, self.processes, self.environment, self.log_dir)
            self.ray.wait_until_up(self._check)
        except RuntimeError as error:
            raise RunFailed(str(error)) from error
        address = f"{self.place.master_addr}:{self.job.settings.ray_port}"
        self.console.print(f"Ray's head is up at {address}", highlight=False)
        if self.head is None:
            return
        self.head.tell_all({"kind": "start_ray", "attempt": self.log_dir.name})
        addresses = [self.place.own_addr, *(hello.address for hello in self.head.nodes())]
        self._run_stage(Stage("ray_nodes", "Ray nodes", ray_nodes_command(self.job, self.place, addresses)))

    def _run_driver(self) -> None:
        self.is_training = True
        stage = driver_stage(self.job)
        self.console.rule(f"[bold]{stage.title}[/bold] ({self._elapsed()})")
        log = self.log_dir / f"{stage.name}.log"
        self.console.print(f"$ {stage.shown()}", style="dim", highlight=False, markup=False, soft_wrap=True)
        output = Console(soft_wrap=True, markup=False, highlight=False)
        # The driver hands settings on to the workers of all nodes; interfaces are each node's own, from its Ray.
        environment = {name: value for name, value in self.environment.items() if not name.endswith("_SOCKET_IFNAME")}
        environment[LOG_DIR] = str(self.log_dir)
        pid, status = run_streaming(self.processes, stage.command, environment, log, output, self._check)
        if status != 0:
            self._look_for_the_cause()
            why = " because a worker died or failed, which the lines above name" if status == EXIT_WORKER_DIED else ""
            raise RunFailed(
                f"the driver (verl.trainer.main_ppo, pid {pid}) {how_it_ended(status)}{why}; its output is in {log}, "
                f"Ray's logs will be in {self.log_dir}"
            )

    def _look_for_the_cause(self) -> None:
        """Raise when a node or Ray has ended too: the driver, which ends with them, may be noticed a moment earlier."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            self._check()
            time.sleep(POLL_S)

    def _check(self) -> None:
        """Raise when a node has gone away or Ray has ended; called while a command runs."""
        if self.head is not None and (problem := self.head.problem()) is not None:
            raise RunFailed(problem)
        if self.ray is not None and (ended := self.ray.ended()) is not None:
            raise RunFailed(ended)

    def _run_worker(self) -> int:
        """Join the head, run Ray as long as it wants, and end when it ends or goes away."""
        settings = self.job.settings
        where = f"{self.place.master_addr}:{settings.control_port}"
        self.console.rule(f"[bold]Worker[/bold] {self.place.own_addr}, head {where}")
        hello = NodeHello(self.place.own_addr, settings.node_rank, config_digest(self.job))
        try:
            channel = join_head(
                self.place.master_addr,
                settings.control_port,
                self.token,
                hello,
                settings.head_timeout_s,
                settings.lost_timeout_s,
            )
        except ValueError as error:
            raise RunFailed(str(error)) from error
        self.console.print("joined; waiting for the head to prepare data and weights", highlight=False)
        try:
            return self._serve(channel)
        finally:
            channel.close()

    def _serve(self, channel: Channel) -> int:
        while True:
            message = channel.receive(timeout_s=POLL_S)
            if message is not None and message.get("kind") == "start_ray":
                self.log_dir = run_logs.open_attempt(self.job.settings.log_dir, str(message.get("attempt")))
                self.ray = cluster.RayNode(self.job, self.place, self.processes, self.environment, self.log_dir)
                self.console.print(
                    "Ray is starting; the head runs the training and shows its progress", highlight=False
                )
            elif message is not None and message.get("kind") == "done":
                status = int(message.get("status", 1))
                if status != 0:
                    raise RunFailed(f"the head {self.place.master_addr} ended the run: {message.get('reason')}")
                self.console.print("the head says that the run is complete", style="green")
                return 0
            elif message is None and channel.lost is not None:
                raise RunFailed(f"the head {self.place.master_addr} went away: it {channel.lost}")
            if self.ray is not None and (ended := self.ray.ended()) is not None:
                # The head's last word may be on its way: it knows better why Ray ended.
                last = channel.receive(timeout_s=2.0)
                if last is not None and last.get("kind") == "done" and last.get("status") == 0:
                    return 0
                raise RunFailed(ended)

    def _end(self, status: int) -> None:
        """End every process of ours, on all nodes; a second signal does not interrupt it."""
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
        if self.head is not None:
            reason = self.head.problem() or f"its part ended with exit status {status}"
            self.head.tell_all({"kind": "done", "status": status, "reason": reason})
        left = self.processes.end_all()
        if self.ray is not None:
            self.ray.keep_logs()
        if self.head is not None:
            self.head.close()
        if left:
            self._complain(f"these processes of this run could not be ended: {', '.join(left)}")
        if self.place.is_head and status == 0:
            self.console.print(f"done in {self._elapsed()}, all processes ended", style="bold green")

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self.started)
        return f"{seconds // 60}:{seconds % 60:02d} since start"

    def _complain(self, text: str) -> None:
        self.console.print(f"error: {text}", style="bold red", highlight=False, markup=False, soft_wrap=True)


def config_digest(job: Job) -> str:
    """Stands for everything that must be equal on all nodes."""
    from verl.trainer.config.load import to_yaml

    return hashlib.sha256(to_yaml(job.config).encode()).hexdigest()


@contextmanager
def only_run(output_dir: Path) -> Iterator[None]:
    """Hold OUTPUT_DIR's lock; ValueError when another run on this machine holds it."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with (output_dir / ".lock").open("a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise ValueError(
                f"OUTPUT_DIR {output_dir} is in use by another run (pid {holder}); choose another one"
            ) from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield


def print_help(recipe: Recipe, console: Console) -> None:
    """The options, and the table of environment variables."""
    console.print(f"usage: {recipe.start_command} [--help] [--print-plan] [--no-plan] [key=value ...]\n", markup=False)
    console.print(
        f"Runs {recipe.title} end to end: data, base model, conversions, Ray, GRPO, report. Finished stages are kept, "
        "and training goes on from its last checkpoint. Every key=value is a Hydra override with verl's names, for "
        "example actor_rollout_ref.rollout.n=16.\n",
        markup=False,
    )
    table = Table("variable", "default", "meaning", box=None, pad_edge=False)
    for name, (default, meaning) in variables(recipe).items():
        table.add_row(name, default, meaning)
    console.print(table)
    console.print("\n--print-plan prints every command, variable and the resolved config of all nodes; nothing starts")
    console.print(
        "--no-plan starts at once; without it the head first plans the run (memory, calls, time) and refuses what "
        "cannot fit"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 0 done, 1 failed, 2 a setting that must be mended, 128 + n stopped by a signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console()
    if not arguments or arguments[0] in ("-h", "--help"):
        console.print(f"usage: python -m recipes.common.launch {'|'.join(recipe_names())} [argument ...]", markup=False)
        return 0 if arguments else BAD_INPUT
    try:
        recipe = load_recipe(arguments.pop(0))
    except ValueError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return BAD_INPUT
    if any(argument in ("-h", "--help") for argument in arguments):
        print_help(recipe, console)
        return 0
    wants_plan = "--print-plan" in arguments
    wants_first_plan = "--no-plan" not in arguments
    overrides = [argument for argument in arguments if argument not in ("--print-plan", "--no-plan")]
    try:
        others = _other_nodes(recipe, overrides)
        settings = read_settings(recipe, overrides, os.environ, find_accelerator())
        job = Job(settings, resolve_config(settings))
        place = _place_for_plan(settings, job) if wants_plan else find_place(settings, job.nnodes)
        found = checks.problems(job, place)
        if wants_plan:
            plan.print_plan(
                job, place, found, Console(soft_wrap=True, highlight=False, markup=False), os.environ, others
            )
            return 0
        if found:
            raise ValueError("\n".join(f"- {problem}" for problem in found))
        with only_run(settings.output_dir) if place.is_head else _no_lock():
            if place.is_head and wants_first_plan:
                _refuse_what_cannot_fit(job, console)
            return _launch(job, place, console, others)
    except ValueError as error:
        console.print(
            f"error: {error}\nNothing was started.", style="red", highlight=False, markup=False, soft_wrap=True
        )
        return BAD_INPUT


def _refuse_what_cannot_fit(job: Job, console: Console) -> None:
    """Tells what the plan of this run says; ValueError with every problem when it cannot fit."""
    plan = first_plan(job, os.environ)
    console.print(plan.summary, highlight=False, markup=False, soft_wrap=True)
    if plan.problems:
        told = "\n".join(f"- {problem}" for problem in plan.problems)
        raise ValueError(f"the run cannot fit (--no-plan starts it all the same):\n{told}")


def _place_for_plan(settings: Settings, job: Job) -> Place:
    """A plan can be printed away from the cluster, so an address that is not ours is no fault."""
    try:
        return find_place(settings, job.nnodes)
    except ValueError:
        address = settings.master_addr or "<address of node 0>"
        return Place(True, address, address, settings.socket_ifname or "<interface>")


def _other_nodes(recipe: Recipe, arguments: Sequence[str]) -> list[hosts.RemoteStart]:
    """How HOSTFILE's other nodes are started; puts this one's own settings into the environment."""
    given = os.environ.get(hosts.HOSTFILE)
    if not given:
        return []
    found = hosts.read_hosts(Path(given).expanduser())
    own = hosts.own_settings(found, os.environ, list(network.own_addresses()))
    starts = hosts.remote_starts(recipe, arguments, found, own, os.environ)
    os.environ.update(own)
    return starts


@contextmanager
def _no_lock() -> Iterator[None]:
    yield


def _launch(job: Job, place: Place, console: Console, others: Sequence[hosts.RemoteStart]) -> int:
    checks.open_file_limit()
    script_pid = os.environ.get(SCRIPT_PID, "")
    if script_pid.isdigit():
        end_with_parent(int(script_pid))
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, _stop)
    run = Launch(job, place, console)
    if not others:
        return run.run()
    nodes = hosts.RemoteNodes(others, run.log_dir)
    status = run.run()
    for problem in nodes.end(patience_s=job.settings.lost_timeout_s):
        console.print(problem, style="yellow", highlight=False, markup=False, soft_wrap=True)
    return status


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # one is enough: the processes are being ended
    raise Stopped(str(number))


if __name__ == "__main__":
    sys.exit(main())
