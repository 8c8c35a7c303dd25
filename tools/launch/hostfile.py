"""HOSTFILE: one node starts the recipe's script on every other one over ssh, and takes part itself as the head.

A node's settings travel on ssh's standard input, not on its command line, which every user of the machine can read. A
remote node ends when the head ends the run or is lost, like any node (``worker_run``).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from recipes.common.recipe import ROOT, Recipe
from tools.launch import network
from tools.launch.processes import OwnProcesses, how_it_ended
from tools.launch.settings import variables

HOSTFILE = "HOSTFILE"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new")
SECRETS = ("RAY_AUTH_TOKEN",)
HIDDEN = "<hidden>"
_LINE = re.compile(r"(?P<address>[\w.:-]+)(?:\s+(?:slots?\s*=\s*)(?P<slots>\d+))?")


class Host(NamedTuple):
    """A line of the file: the address for ssh, and the number of devices, None when the line has none."""

    address: str
    slots: int | None


class RemoteStart(NamedTuple):
    """How one other node is started: the command here, and the script on its standard input."""

    host: Host
    command: tuple[str, ...]
    script: str


def read_hosts(path: Path) -> list[Host]:
    """The nodes of an mpi host file; ValueError that names every line that cannot be read."""
    if not path.is_file():
        raise ValueError(f"{HOSTFILE} {path}: no such file; expected a line per node: address slots=8")
    hosts, problems = [], []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{HOSTFILE} {path} is not text; expected a line per node: address slots=8") from None
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if match := _LINE.fullmatch(text):
            hosts.append(Host(match["address"], int(match["slots"]) if match["slots"] else None))
        elif text:
            problems.append(f"{HOSTFILE} {path}, line {number}: {text!r}; expected address, or address slots=8")
    counts = Counter(host.address for host in hosts)
    problems += [f"{HOSTFILE} {path} names {name} twice" for name in sorted(counts) if counts[name] > 1]
    if len({host.slots for host in hosts}) > 1:
        problems.append(f"{HOSTFILE} {path}: the nodes have different slots; every node must have as many devices")
    if not hosts and not problems:
        problems.append(f"{HOSTFILE} {path} names no node")
    if problems:
        raise ValueError("\n".join(problems))
    return hosts


def own_settings(hosts: Sequence[Host], environment: Mapping[str, str], own_addresses: Sequence[str]) -> dict[str, str]:
    """NNODES, MASTER_ADDR, NODE_RANK and NPUS_PER_NODE of this node, the head; ValueError when it is not listed."""
    master = environment.get("MASTER_ADDR", "")
    if not master:
        here = [host.address for host in hosts if network.is_own(network.resolve(host.address), own_addresses)]
        if not here:
            raise ValueError(
                f"{HOSTFILE} names none of this machine's addresses ({', '.join(own_addresses)}): start the script on "
                "one of its nodes"
            )
        master = here[0]
    elif master not in [host.address for host in hosts]:
        raise ValueError(
            f"MASTER_ADDR {master} is not in {HOSTFILE}; leave it out, or give one of the file's addresses"
        )
    found = {"NNODES": str(len(hosts)), "MASTER_ADDR": master, "NODE_RANK": "0"}
    if hosts[0].slots is not None:
        found["NPUS_PER_NODE"] = str(hosts[0].slots)
    for name in ("NNODES", "NPUS_PER_NODE"):
        value = environment.get(name)
        if value and value != found.get(name, value):
            raise ValueError(f"{name} is {value}, and {HOSTFILE} says {found[name]}; leave {name} out")
    return found


def remote_starts(
    recipe: Recipe,
    arguments: Sequence[str],
    hosts: Sequence[Host],
    own: Mapping[str, str],
    environment: Mapping[str, str],
) -> list[RemoteStart]:
    """How every node but this one is started: the same script and settings, with its own rank."""
    given = {name: environment[name] for name in variables(recipe) if name != HOSTFILE and environment.get(name)}
    start = f"exec {shlex.join([*recipe.start_command.split(), *arguments])} </dev/null"
    starts = []
    for rank, host in enumerate((host for host in hosts if host.address != own["MASTER_ADDR"]), start=1):
        sent = {**given, **own, "NODE_RANK": str(rank)}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in sent.items()]
        script = "\n".join([*lines, f"cd {shlex.quote(str(ROOT))}", start, ""])
        starts.append(RemoteStart(host, (*SSH, host.address, "bash", "-s"), script))
    return starts


def shown(start: RemoteStart, environment: Mapping[str, str]) -> str:
    """Command and script as a person would type them, with hidden secrets."""
    script = start.script
    for name in SECRETS:
        if environment.get(name):
            script = script.replace(shlex.quote(environment[name]), HIDDEN)
    return f"{shlex.join(start.command)} <<'END'\n{script}END"


class RemoteNodes:
    """The other nodes' ssh connections, each with a log of its node's output."""

    def __init__(self, starts: Sequence[RemoteStart], log_dir: Path) -> None:
        self._processes = OwnProcesses()
        self._nodes: list[tuple[Host, Path, subprocess.Popen[bytes]]] = []
        log_dir.mkdir(parents=True, exist_ok=True)
        for start in starts:
            log = log_dir / f"node_{start.host.address}.log"
            with log.open("ab") as output:
                process = self._processes.start(start.command, os.environ, output, standard_input=start.script.encode())
            self._nodes.append((start.host, log, process))

    def end(self, patience_s: float) -> list[str]:
        """Wait so long for the nodes to end, then cut the connections; a sentence for each node that failed."""
        problems = []
        deadline = time.monotonic() + patience_s
        for host, log, process in self._nodes:
            try:
                status = process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                problems.append(f"node {host.address} had not ended after {patience_s:g} s; its output is in {log}")
                continue
            if status != 0:
                problems.append(f"node {host.address}: ssh {how_it_ended(status)}; its output is in {log}")
        self._processes.end_all()
        return problems
