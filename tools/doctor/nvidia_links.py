"""What GPUs talk over: NVLink within a node, RDMA between nodes, and the variables that choose for NCCL."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.doctor.finding import GIB, Finding
from tools.doctor.nvidia_smi import SmiError, run

INFINIBAND = Path("/sys/class/infiniband")
ESCAPES = re.compile(r"\x1b\[[\d;]*m")  # topo underlines its header


def findings(num_gpus: int) -> Iterator[Finding]:
    """Findings about links; a node with one GPU has none of NVLink."""
    if num_gpus > 1:
        try:
            yield nvlink(run("topo", "-m"), run("nvlink", "--status"))
        except SmiError as error:
            yield Finding("NVLink", f"unknown: nvidia-smi: {error}", "see `nvidia-smi topo -m`")
    ports = rdma_ports()
    yield rdma(ports)
    yield from nccl_variables(ports)
    if ports:
        yield locked_memory()


def nvlink(topology: str, status: str) -> Finding:
    """Whether each pair of GPUs is connected by NVLink, and all links are up.

    Args:
        topology: of ``nvidia-smi topo -m``, a matrix whose cell NV18 means 18 links.
        status: of ``nvidia-smi nvlink --status``, a line for each link below each GPU.
    """
    lines = [[cell.strip() for cell in line.split("\t")] for line in ESCAPES.sub("", topology).splitlines()]
    columns = [i for i, cell in enumerate(lines[0]) if re.fullmatch(r"GPU\d+", cell)]
    rows = [line for line in lines[1:] if re.fullmatch(r"GPU\d+", line[0])]
    kinds = {row[i] for row in rows for i in columns if row[i] != "X"}
    down, gpu = [], ""
    for line in status.splitlines():
        if found := re.match(r"GPU \d+", line):
            gpu = found[0]
        elif found := re.search(r"(Link \d+): <?inactive", line):
            down.append(f"{gpu} {found[1]}")
    others = sorted(kind for kind in kinds if not kind.startswith("NV"))
    if down:
        return Finding(
            "NVLink", f"inactive: {', '.join(down)}", "reset the GPUs, or the fabric manager; else leave it out"
        )
    if others:
        remedy = "tensor and expert parallelism are slow between such GPUs: keep them to 1, or take a node with NVLink"
        return Finding("NVLink", f"not between all GPUs ({', '.join(others)})", remedy)
    return Finding("NVLink", f"{', '.join(sorted(kinds))} between all {len(rows)} GPUs")


def rdma_ports() -> dict[str, str]:
    """Device and port ("mlx5_0:1") -> its state, speed and kind as the kernel shows them."""
    ports = {}
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        state, rate, layer = (_read(port / name) for name in ("state", "rate", "link_layer"))
        ports[f"{port.parts[-3]}:{port.name}"] = (
            f"{state.split(':')[-1].strip()}, {rate.split('(')[0].strip()}, {layer}"
        )
    return ports


def rdma(ports: Mapping[str, str]) -> Finding:
    active = {name: text for name, text in ports.items() if text.startswith("ACTIVE")}
    if active:
        kinds = sorted({text.partition(", ")[2] for text in active.values()})
        return Finding("InfiniBand, RoCE", f"{len(active)} of {len(ports)} ports active ({'; '.join(kinds)})")
    found = f"no active port ({'; '.join(ports)})" if ports else "none: nodes talk over TCP"
    remedy = (
        "for several nodes: load the driver, start the container with --device=/dev/infiniband, check cable and switch"
    )
    return Finding("InfiniBand, RoCE", found, remedy)


def nccl_variables(ports: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether what NCCL_SOCKET_IFNAME and NCCL_IB_HCA name is there.

    Both are lists of prefixes; ``=`` in front asks for whole names, ``^`` excludes (NCCL's environment variables).
    """
    active = [name for name, text in ports.items() if text.startswith("ACTIVE")]
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable, present in (("NCCL_SOCKET_IFNAME", interfaces), ("NCCL_IB_HCA", active)):
        value = environment.get(variable, "")
        if not value or value.startswith("^"):
            continue
        missing = [name for name in value.lstrip("=").split(",") if not _matches(name, present, value.startswith("="))]
        remedy = f"unset {variable}, or name some of: {', '.join(present) or 'nothing is up'}"
        shown = f"{value}; not there: {', '.join(missing)}" if missing else value
        yield Finding(variable, shown, remedy if missing else "", is_fatal=bool(missing))


def _matches(name: str, present: Sequence[str], is_whole: bool) -> bool:
    """Whether a name of a list fits something that is there; without a port a device stands for all of its ports."""
    return any(full in (name, f"{name}:1") if is_whole else full.startswith(name) for full in present)


def locked_memory() -> Finding:
    """Whether RDMA may lock memory, in a container by ``--ulimit memlock=-1``."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "unlimited")
    remedy = "RDMA registers its buffers: ulimit -l unlimited; in a container --ulimit memlock=-1"
    return Finding("locked memory", f"{limit / GIB:.2g} GiB", remedy)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"
