"""The nodes of a run as Ray sees them: ``join`` waits for all, ``watch`` ends when one is lost, ``end`` ends them all.

Each node's launcher gives its Ray the node's facts as labels; the head compares those of every node with its own. The
commands alone import Ray: the launcher reads names from this module.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_formats.files import write_text
from tools.doctor.host import version_of
from tools.launch.records import code_digest
from vllm_ascend.versions import cann_version

POLL_S = 0.3
PROBLEM = "problem: "  # begins the line that says why ``join`` or ``watch`` failed
END_FILE = "RECIPE_RUN_END"  # a node's variable: the file that tells its launcher that the head has ended the run
END_TIMEOUT_S = 10.0
RANK = "node_rank"
# What a label stands for, and what to do where it differs.
REMEDIES = {
    "configuration": "start the same script with the same settings on every node",
    "code": "every node needs the same version of this repository",
}
PACKAGES = ("torch", "torch-npu", "transformers", "tensordict", "numpy")


def node_labels(config_text: str, root: Path, node_rank: int | None) -> dict[str, str]:
    """The facts that must be the same on all nodes, and the rank of this one, as labels of Ray."""
    facts = {
        "configuration": hashlib.sha256(config_text.encode()).hexdigest()[:16],
        "code": code_digest(root),
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: version_of(name) for name in PACKAGES},
        "CANN": cann_version(),
        RANK: None if node_rank is None else str(node_rank),
    }
    return {name: re.sub(r"[^\w.-]", "_", value) for name, value in facts.items() if value}


def join(num_nodes: int, timeout_s: float) -> str | None:
    """Wait until Ray has all nodes and they are alike; the problem when that fails."""
    import ray

    deadline = time.monotonic() + timeout_s
    joined: set[str] = set()
    while True:
        head, *others = _alive_nodes()
        for node in others:
            if node["NodeID"] not in joined:
                joined.add(node["NodeID"])
                print(f"{_name(node)} joined", flush=True)
            if differences := different_labels(head["Labels"], node["Labels"]):
                return f"node {_name(node)} does not fit the head: {differences}"
        if len(others) + 1 >= num_nodes:
            addresses = [node["NodeManagerAddress"] for node in (head, *others)]
            print(f"Ray has all {num_nodes} nodes: {', '.join(addresses)}", flush=True)
            return None
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    address, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    names = [f"{head['NodeManagerAddress']} (this head)", *map(_name, others)]
    ranks = {node["Labels"].get(RANK) for node in others}
    missing = f"{num_nodes - len(names)} (give NODE_RANK on every node to have them named)"
    if None not in ranks:
        missing = ", ".join(f"node {rank}" for rank in range(1, num_nodes) if str(rank) not in ranks)
    return (
        f"{len(names)} of {num_nodes} nodes were there after {timeout_s:g} s: {', '.join(names)}; missing: {missing}. "
        f"Start the same script there with MASTER_ADDR={address} (port {port} must be open)"
    )


def different_labels(head: Mapping[str, str], node: Mapping[str, str]) -> str:
    """Each fact of ``node`` that is not the head's, with both values or with what to do; empty when there is none."""
    found = []
    for name in sorted({name for name, _ in head.items() ^ node.items() if name != RANK}):
        if name.startswith("ray.io/"):
            continue
        values = f"{name} is {node.get(name, 'missing')}, the head has {head.get(name, 'none')}"
        found.append(f"its {name} is not the head's: {REMEDIES[name]}" if name in REMEDIES else values)
    return "; ".join(found)


def watch(num_nodes: int) -> str:
    """Return the problem once Ray has lost a node; it finds that out by itself (``ray_node.loss_variables``)."""
    import ray

    watched = {node["NodeID"] for node in _alive_nodes()}
    is_short = len(watched) < num_nodes  # a node went away after all had joined, before this process began
    while True:
        for node in ray.nodes():
            if not node["Alive"] and (is_short or node["NodeID"] in watched):
                return f"node {_name(node)} went away: {node['DeathReasonMessage'] or 'Ray has lost it'}"
        if is_short:
            return f"Ray has {len(watched)} of {num_nodes} nodes"
        time.sleep(POLL_S)


def end(status: int, reason: str) -> None:
    """Tell the launchers of all other nodes that the run has ended, through a task on each node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(_write_end)
    text = json.dumps({"status": status, "reason": reason})
    strategies = (NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in _alive_nodes()[1:])
    if pending := [task.options(scheduling_strategy=strategy).remote(text) for strategy in strategies]:
        ray.wait(pending, num_returns=len(pending), timeout=END_TIMEOUT_S)


def _write_end(text: str) -> None:
    write_text(Path(os.environ[END_FILE]), text, is_durable=False)


def _alive_nodes() -> list[dict[str, Any]]:
    """The head first, the others by rank."""
    import ray

    def order(node: Mapping[str, Any]) -> tuple[bool, int, str]:
        is_head = "node:__internal_head__" in node["Resources"]
        return not is_head, int(node["Labels"].get(RANK, 0)), node["NodeManagerAddress"]

    return sorted((node for node in ray.nodes() if node["Alive"]), key=order)


def _name(node: Mapping[str, Any]) -> str:
    rank = node["Labels"].get(RANK)
    address: str = node["NodeManagerAddress"]
    return address if rank is None else f"{address} (node {rank})"


def problem_in(output: Path) -> str | None:
    """The problem that a command of this module has printed to ``output``; None when it has not."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.is_file() else []
    return next((line.removeprefix(PROBLEM) for line in reversed(lines) if line.startswith(PROBLEM)), None)


def main() -> int:
    """Entry point; RAY_ADDRESS names the head. Exit status 1 with the problem as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("join", "watch", "end"))
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--status", type=int, default=1)
    parser.add_argument("--reason", default="")
    args = parser.parse_args()
    import ray

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
    if args.command == "end":
        end(args.status, args.reason)
        return 0
    problem = join(args.num_nodes, args.timeout_s) if args.command == "join" else watch(args.num_nodes)
    if problem is None:
        return 0
    end(1, problem)
    print(f"{PROBLEM}{problem}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
