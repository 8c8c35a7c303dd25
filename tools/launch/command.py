"""What ``tools.launch`` does: reads and checks everything, plans the run, then starts this node's part."""

from __future__ import annotations

import os
import pwd
import resource
import signal
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from hf_formats.cache_folder import moved_caches
from hf_formats.parent_death import end_with_parent
from recipes.common.exit_status import BAD_INPUT
from recipes.common.recipe import Recipe, load_recipe
from tools.launch import checks, hostfile, network
from tools.launch.accelerators import count_accelerators, find_accelerator
from tools.launch.first_plan import first_plan
from tools.launch.head_run import HeadRun
from tools.launch.hub import model_directory
from tools.launch.job import Job, resolve_config
from tools.launch.layout_choice import choose_layout, without_layout
from tools.launch.node_run import NodeRun, Stopped
from tools.launch.output_dir import only_run
from tools.launch.print_plan import print_plan
from tools.launch.records import Records
from tools.launch.roles import NodeRole, find_role
from tools.launch.settings import SettingsError, read_settings
from tools.launch.small_model import with_small_model
from tools.launch.worker_run import WorkerRun
from verl.trainer.config import ConfigError
from verl.utils.net_utils import LOOPBACK

SCRIPT_PID = "RECIPE_SCRIPT_PID"  # set by start.sh: its own process id
OPEN_FILES = 32768  # Ray needs many


def launch(arguments: list[str]) -> int:
    """Run or explain the recipe that ``arguments`` begin with; returns the exit status."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    try:
        recipe = load_recipe(arguments.pop(0))
    except ValueError as error:
        console.print(f"error: {error}", style="red")
        return BAD_INPUT
    try:
        return _run_or_print(recipe, arguments, console)
    except ValueError as error:
        console.print(f"error: {error}\nNothing was started.", style="red")
        return BAD_INPUT


def _run_or_print(recipe: Recipe, arguments: Sequence[str], console: Console) -> int:
    """Check everything, then run this node's part or print the plan; ValueError with every problem."""
    overrides = [argument for argument in arguments if argument not in ("--print-plan", "--no-plan")]
    others, may_plan = _other_nodes(recipe, overrides), "--no-plan" not in arguments
    job, problems = _read_job(recipe, overrides, with_weights="--print-plan" not in arguments)
    chooses = job.settings.chooses_layout
    if "--print-plan" in arguments:
        _print_plan(job, problems, may_plan, others, console)
        return 0
    job = job.with_ray_port()
    try:
        role = find_role(job.settings, job.nnodes)
    except ValueError as error:
        problems.append(str(error))
        role = _role_for_plan(job)
    problems += checks.problems(without_layout(job) if chooses else job, role)
    choice = None
    if chooses and not problems:  # what no layout mends is refused before one is searched
        choice = choose_layout(job, may_plan, console.print)
        console.print("\n".join(choice.lines))
        job = choice.applied(job)
        problems = checks.problems(job, role)
    if problems:
        raise ValueError(_listed(problems))
    with only_run(job.settings.output_dir) if role.is_head else nullcontext():
        if role.is_head and may_plan:
            plan = first_plan(job, records=Records(job.settings.output_dir))
            console.print(plan.summary)
            if plan.problems:
                raise ValueError(f"the run cannot fit (--no-plan starts it all the same):\n{_listed(plan.problems)}")
        if role.is_head and choice is not None:
            choice.write(job.settings.output_dir)
        return _launch(job, role, others)


def _print_plan(
    job: Job, problems: list[str], may_plan: bool, others: Sequence[hostfile.RemoteStart], console: Console
) -> None:
    """Print the plan with the layout that is chosen for it; a model's description is enough."""
    lines: tuple[str, ...] = ()
    if job.settings.chooses_layout and not problems:
        try:
            choice = choose_layout(job, may_plan, lambda text: None)
        except ValueError as error:
            problems.append(str(error))
        else:
            job, lines = choice.applied(job), choice.lines
    role = _role_for_plan(job)
    print_plan(job, role, [*problems, *checks.problems(job, role)], console, others, lines)


def _read_job(recipe: Recipe, overrides: Sequence[str], with_weights: bool) -> tuple[Job, list[str]]:
    """The job, and what is wrong with variables and keys, whose defaults are in it; fetches or converts the model.

    ValueError where there is no config at all; it has the problems of everything else too.
    """
    problems: list[str] = []
    try:
        accelerator = find_accelerator()
        settings = read_settings(recipe, overrides, os.environ, accelerator, count_accelerators(accelerator))
    except SettingsError as error:
        settings, problems = error.settings, error.problems
    if with_weights:
        _move_caches()
    if recipe.cpu_config is not None and not problems and (path := settings.model_path):
        given, hub, folder = os.environ["MODEL_PATH"].strip(), settings.model_source, settings.output_dir
        settings = replace(settings, model_path=model_directory(given, path, hub, folder, with_weights))
    if not problems:
        settings, line = with_small_model(settings, os.environ)
        print(f"{line}\n" if line else "", end="", flush=True)
    try:
        config = resolve_config(settings)
    except ConfigError as error:
        problems += error.problems
        if error.config is None:
            head = NodeRole(True, LOOPBACK, LOOPBACK, "lo")
            raise ValueError(_listed(problems + checks.setting_problems(settings, head))) from None
        config = error.config
    return Job(settings, config), problems


def _move_caches() -> None:
    """Bring caches into a folder that can hold them, for everything that is started from here; says so in a line."""
    moved = moved_caches()
    os.environ.update(moved)
    if moved:
        where = moved["XDG_CACHE_HOME"]
        print(f"the home of this user cannot hold libraries: caches of kernels and the like are in {where}", flush=True)
    if not {"LOGNAME", "USER"} & set(os.environ):
        with suppress(KeyError):
            pwd.getpwuid(os.getuid())
            return
        os.environ["USER"] = str(os.getuid())  # torch names a folder by the user, whom this machine does not know


def _listed(problems: Sequence[str]) -> str:
    return "\n".join(f"- {problem}" for problem in problems)


def _role_for_plan(job: Job) -> NodeRole:
    """This node's role, or the head's: a plan can be printed away from the cluster, where no address is ours."""
    try:
        return find_role(job.settings, job.nnodes)
    except ValueError:
        address = job.settings.master_addr or "<address of node 0>"
        return NodeRole(True, address, address, job.settings.socket_ifname or "<interface>")


def _other_nodes(recipe: Recipe, arguments: Sequence[str]) -> list[hostfile.RemoteStart]:
    """How HOSTFILE's other nodes are started; puts this one's own settings into the environment."""
    given = os.environ.get(hostfile.HOSTFILE)
    if not given:
        return []
    hosts = hostfile.read_hosts(Path(given).expanduser())
    own = hostfile.own_settings(hosts, os.environ, list(network.own_addresses()))
    starts = hostfile.remote_starts(recipe, arguments, hosts, own, os.environ)
    os.environ.update(own)
    return starts


def _launch(job: Job, role: NodeRole, others: Sequence[hostfile.RemoteStart]) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    script_pid = os.environ.get(SCRIPT_PID, "")
    if script_pid.isdigit():
        end_with_parent(int(script_pid))
    run: NodeRun = (HeadRun if role.is_head else WorkerRun)(job, role, Console())

    def on_signal(number: int, frame: FrameType | None) -> None:
        if run.save_and_stop(signal.Signals(number)):
            return
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)  # one is enough: the processes are being ended
        raise Stopped(signal.Signals(number))

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, on_signal)
    if not isinstance(run, HeadRun) or not others:  # whoever starts the others is the head
        return run.run()
    nodes = hostfile.RemoteNodes(others, run.log_dir)
    status = run.run()
    for problem in nodes.end(patience_s=job.settings.lost_timeout_s):
        run.print(problem, "yellow")
    return status
