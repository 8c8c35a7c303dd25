"""The network: interfaces and ports of the run, and the dies' own links and HCCL's ports."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from tools.doctor.finding import Finding, Options
from tools.launch import network

HCCL_DEFAULT_PORT = 60000  # HCCL's own, without HCCL_HOST_SOCKET_PORT_RANGE and HCCL_IF_BASE_PORT
HCCL_NUM_PORTS = 32
CANN_OF_GLOBAL_AIV = "8.2.RC1"  # both recipes of 2025 ran on it with HCCL_OP_EXPANSION_MODE=AIV
HCCN_TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"
TOOL_TIMEOUT_S = 20


def interfaces(options: Options) -> Iterator[Finding]:
    """The address that a run would use, and whether its ports are free."""
    addresses = network.own_addresses()
    names = ", ".join(f"{name} {address}" for address, name in addresses.items()) or "none"
    try:
        chosen = network.address_towards(options.master_addr, options.socket_ifname)
    except ValueError as error:
        yield Finding("interfaces", names, str(error), is_fatal=True)
        return
    yield Finding("interfaces", f"{names}; a run would use {addresses.get(chosen, 'none')}")
    for port in options.ports:
        problem = network.port_problem("port", port)
        yield Finding(f"port {port}", "in use" if problem else "free", problem or "")


def hccl_ports(environment: Mapping[str, str] = os.environ) -> Finding:
    """The host's ports that HCCL listens on, from its environment variables."""
    wanted = environment.get("HCCL_HOST_SOCKET_PORT_RANGE", "")
    if wanted == "auto":
        return Finding("HCCL ports", "chosen by the system (HCCL_HOST_SOCKET_PORT_RANGE=auto)")
    try:
        first = int(environment.get("HCCL_IF_BASE_PORT") or HCCL_DEFAULT_PORT)
        ports = _port_list(wanted) if wanted else list(range(first, first + HCCL_NUM_PORTS))
        shown = f"{ports[0]} to {ports[-1]}"
    except (ValueError, IndexError):  # no number, or a range without ports
        remedy = "set HCCL_HOST_SOCKET_PORT_RANGE=auto, or ranges such as 60000-60050,60150-60160"
        return Finding("HCCL ports", f"HCCL_HOST_SOCKET_PORT_RANGE={wanted!r} cannot be read", remedy, is_fatal=True)
    taken = [port for port in ports if network.port_problem("port", port)]
    if not taken:
        return Finding("HCCL ports", f"{shown}, free")
    remedy = "set HCCL_HOST_SOCKET_PORT_RANGE=auto (recipes/common/npu_env.sh does), or end what holds them"
    return Finding("HCCL ports", f"{shown}; in use: {', '.join(map(str, taken))}", remedy, is_fatal=True)


def hccl_expansion(cann: str | None, environment: Mapping[str, str] = os.environ) -> Finding:
    """Whether all of the job's collectives are expanded on the vector cores, by the environment's variable."""
    name, mode = "HCCL expansion", environment.get("HCCL_OP_EXPANSION_MODE", "")
    if mode != "AIV":
        return Finding(name, mode or "by group: the rollout engine's TP and EP groups on the vector cores")
    remedy = "unset HCCL_OP_EXPANSION_MODE: CANN leaves several communicators on the vector cores at a time undefined"
    return Finding(name, "AIV for the whole job", remedy, is_fatal=not (cann or "").startswith(CANN_OF_GLOBAL_AIV))


def die_links(dies: Sequence[int], tool: str | None = None) -> Finding:
    """Whether every die's own network port is up, by hccn_tool."""
    tool = tool or shutil.which("hccn_tool") or (HCCN_TOOL if os.path.exists(HCCN_TOOL) else None)
    if tool is None:
        remedy = f"mount the driver's tools into the container ({HCCN_TOOL}), then run this again"
        return Finding("HCCL links", "hccn_tool not found", remedy)
    states = {die: _link_state(tool, die) for die in dies}
    down = [f"die {die}: {state}" for die, state in states.items() if state != "UP"]
    if not down:
        return Finding("HCCL links", f"{len(states)} of {len(states)} up")
    remedy = "dies across nodes cannot talk: check cable and switch port, then `hccn_tool -i <die> -link -g`"
    return Finding("HCCL links", "; ".join(down), remedy, is_fatal=True)


def _link_state(tool: str, die: int) -> str:
    try:
        command = [tool, "-i", str(die), "-link", "-g"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"hccn_tool hangs for {TOOL_TIMEOUT_S} s"
    except OSError as error:
        return f"hccn_tool does not start ({error.strerror})"
    found = re.search(r"link status:\s*(\w+)", done.stdout)
    return found[1].upper() if found else f"no link status (exit code {done.returncode})"


def _port_list(text: str) -> list[int]:
    """The ports of ranges such as 60000-60050,60150; ValueError when the text cannot be read."""
    ends = [part.partition("-") for part in text.split(",")]
    return [port for first, _, last in ends for port in range(int(first), int(last or first) + 1)]
