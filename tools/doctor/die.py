"""`python -m tools.doctor --die`: what no simulator shows, found out on this machine's dies, a row each.

Every visible die has a process, a rank, which sends its findings and ends. The first one runs ops (die_ops.py), the
last one a captured layer (die_layer.py); then all of them exchange tokens of experts (die_experts.py) and what each
group sends (die_groups.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch.distributed as dist
import torch.multiprocessing as mp

from tools.doctor import die_experts, die_groups, die_layer, die_ops
from tools.doctor.die_check import Check, Die, is_simulated
from tools.doctor.finding import Finding
from verl.utils.distributed import join_world
from verl.utils.net_utils import LOOPBACK, free_ports
from vllm.platforms import resolve_platform

IF_WELL = "Everything is as expected of these dies."
IF_NOT = "Something is not as expected of these dies: see the problems above."
SIMULATED = "The dies are simulated: times are not judged."
WITHOUT_RESULT = "see the output of the ranks; the first row without a result is where they stopped"
TIMEOUT_S = 300
RAISED = "failed: "


def examine() -> list[Finding]:
    """A finding for every check; ValueError or ImportError where no die can be used."""
    num_dies = resolve_platform("npu").num_devices()
    return rows(num_dies, *run_ranks(num_dies))


def rows(num_dies: int, found: Mapping[str, Sequence[Finding]], ends: Sequence[str]) -> list[Finding]:
    """A finding for every check, from those of the ranks by name; ``ends``: how ranks ended that did not end well."""
    alone, together = checks_alone(0, 1), checks_together()
    missing = Finding("", f"no result: {'; '.join(ends)}", WITHOUT_RESULT, is_fatal=True)
    skipped = missing if num_dies > 1 else Finding("", "skipped: needs two dies")
    made = []
    for checks, without in ((alone, missing), (together, skipped)):
        for name in (check.name for check in checks):
            # The first rank's, unless another's is worse.
            of_ranks = found.get(name) or [replace(without, name=name)]
            made.append(max(of_ranks, key=lambda finding: (finding.is_fatal, bool(finding.remedy))))
    return made


def verdict(has_problem: bool) -> str:
    return "\n".join([IF_NOT if has_problem else IF_WELL, *([SIMULATED] if is_simulated() else [])])


def checks_alone(rank: int, num_dies: int) -> list[Check]:
    """What a rank does by itself."""
    checks = die_ops.checks() if rank == 0 else []
    return checks + ([die_layer.CHECK] if rank == num_dies - 1 else [])


def checks_together() -> list[Check]:
    """What all ranks do together, in this order."""
    return [die_experts.CHECK, *die_groups.checks()]


def run_ranks(num_dies: int) -> tuple[dict[str, list[Finding]], list[str]]:
    """The findings of all ranks by name, in rank order, and how those ended that did not end well."""
    context, (port,) = mp.get_context("spawn"), free_ports(1)
    ranks: list[BaseProcess] = []
    receivers = []
    for rank in range(num_dies):
        receiver, sender = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_run_rank, args=(rank, num_dies, port, sender), daemon=True))
        ranks[-1].start()
        sender.close()  # the rank's own copy is left: its end is the end of the pipe
        receivers.append(receiver)
    found: list[list[Finding]] = [[] for _ in ranks]
    try:
        ends = _receive(ranks, receivers, found)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    by_name: dict[str, list[Finding]] = {}
    for finding in (finding for of_rank in found for finding in of_rank):
        by_name.setdefault(finding.name, []).append(finding)
    return by_name, ends


def _receive(ranks: Sequence[BaseProcess], receivers: Sequence[Connection], found: list[list[Finding]]) -> list[str]:
    """Append each rank's findings as they come. Unblocked by a finding, by the end of a rank or by the deadline.

    The others would wait for a rank that has failed: they get the time for what they do alone.
    """
    deadline = time.monotonic() + TIMEOUT_S
    ends: list[str] = []
    running = {receiver: rank for rank, receiver in enumerate(receivers)}
    num_alone = [len(checks_alone(rank, len(ranks))) for rank in range(len(ranks))]
    while running and not (ends and all(len(found[rank]) >= num_alone[rank] for rank in running.values())):
        ready = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            return [*ends, *(f"rank {rank} has not ended after {TIMEOUT_S} s" for rank in running.values())]
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = running[receiver]
            try:
                found[rank].append(receiver.recv())
            except EOFError:
                del running[receiver]
                ranks[rank].join(TIMEOUT_S)
                if ranks[rank].exitcode != 0:
                    ends.append(f"rank {rank} ended with exit code {ranks[rank].exitcode}")
    return ends


def _run_rank(rank: int, num_dies: int, port: int, sender: Connection) -> None:
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_dies, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()})
    platform = resolve_platform("npu")
    die = Die(platform.device(rank), platform, rank, num_dies)
    for check in checks_alone(rank, num_dies):
        sender.send(finding_of(check, die))
    if num_dies == 1:
        return
    join_world("npu", TIMEOUT_S)
    for check in checks_together():
        finding = finding_of(check, die)
        sender.send(finding)
        if finding.value.startswith(RAISED):  # the others wait in the exchange that this rank has left
            raise SystemExit(1)
    dist.barrier()
    dist.destroy_process_group()


def finding_of(check: Check, die: Die) -> Finding:
    """What the check finds; what it raises is a finding too, or the rows after it would be lost."""
    try:
        return check.find(die)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        remedy = "this call does not run on this machine: report it with the versions of CANN, driver and torch_npu"
        return Finding(check.name, f"{RAISED}{type(error).__name__}: {lines[0]}", remedy, is_fatal=True)
