"""Says what this machine has for a run, what is wrong with it, and what to do about each."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from recipes.r1_zero.launcher import network
from third_party import jemalloc

ROOT = Path(__file__).resolve().parents[1]
GIB = 1024**3
# The default recipe's peak on a host without NPUs, rounded up: checkpoints, converted weights and the environment.
MIN_FREE_DISK_GIB = 10
MIN_MEMORY_GIB = 8
CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")
DRIVER_VERSION_FILE = Path("/usr/local/Ascend/driver/version.info")
# torch_npu version -> the CANN it was published with.
CANN_OF_TORCH_NPU = {"2.5.1.post1": "8.2"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``remedy`` is empty when all is well; a fatal problem keeps a run from starting."""

    name: str
    value: str
    remedy: str = ""
    is_fatal: bool = False

    @property
    def mark(self) -> str:
        if not self.remedy:
            return "[green]ok[/green]"
        return "[red]problem[/red]" if self.is_fatal else "[yellow]note[/yellow]"


@dataclass(frozen=True)
class Options:
    """What the report is for."""

    output_dir: Path
    ports: tuple[int, ...]
    master_addr: str | None
    socket_ifname: str | None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.doctor", description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "outputs", help="where a run would write")
    parser.add_argument("--ports", type=int, nargs="*", default=[6766, 6767], help="ports that must be free")
    parser.add_argument(
        "--master-addr", default=os.environ.get("MASTER_ADDR"), help="the head node (default: MASTER_ADDR)"
    )
    parser.add_argument(
        "--socket-ifname", default=os.environ.get("SOCKET_IFNAME"), help="interface to use (default: SOCKET_IFNAME)"
    )
    args = parser.parse_args()
    options = Options(args.output_dir, tuple(args.ports), args.master_addr, args.socket_ifname)
    findings = examine(options)
    _show(Console(), findings)
    sys.exit(any(finding.is_fatal for finding in findings))


def examine(options: Options) -> list[Finding]:
    """Every finding about this machine, in the order of a reader's questions."""
    parts: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _ascend,
        _host,
        lambda: _disk(options.output_dir),
        _jemalloc,
        lambda: _network(options),
    )
    return [finding for part in parts for finding in part()]


def _python() -> Iterator[Finding]:
    is_old = sys.version_info < (3, 11)
    remedy = "install Python 3.11 or newer and run tools/setup_env.sh" if is_old else ""
    yield Finding("python", f"{platform.python_version()} ({sys.executable})", remedy, is_fatal=is_old)


def _packages() -> Iterator[Finding]:
    pins = pinned(ROOT / "requirements/base.txt")
    for name in ("torch", "ray", "transformers", "tensordict"):
        version = version_of(name)
        if version is None:
            yield Finding(name, "not installed", "run tools/setup_env.sh", is_fatal=True)
        elif version.split("+")[0] != pins[name]:
            yield Finding(name, version, f"pinned is {pins[name]}: run tools/setup_env.sh")
        else:
            yield Finding(name, version)


def _ascend() -> Iterator[Finding]:
    devices = sorted(Path("/dev").glob("davinci[0-9]*"))
    torch_npu, cann = version_of("torch-npu"), cann_version()
    if not devices:
        yield Finding("NPUs", "none: runs use the CPU")
        if torch_npu:
            yield Finding("torch_npu", torch_npu)
        return
    yield Finding("NPUs", f"{len(devices)} dies")
    yield _driver()
    if cann is None:
        yield Finding(
            "CANN", "not found", f"install it, or source set_env.sh; looked in {', '.join(CANN_FOLDERS)}", True
        )
    else:
        yield Finding("CANN", cann)
    if torch_npu is None:
        yield Finding(
            "torch_npu", "not installed", "run tools/setup_env.sh: it adds torch_npu where it sees NPUs", True
        )
        return
    wanted = CANN_OF_TORCH_NPU.get(torch_npu)
    is_other = bool(cann and wanted and not cann.startswith(wanted))
    yield Finding("torch_npu", torch_npu, f"it was published with CANN {wanted}, here is {cann}" if is_other else "")


def _driver() -> Finding:
    if not DRIVER_VERSION_FILE.is_file():
        return Finding("driver", "version unknown", f"no {DRIVER_VERSION_FILE}: mount the driver into the container")
    found = re.search(r"^Version=(.+)$", DRIVER_VERSION_FILE.read_text(encoding="utf-8"), re.MULTILINE)
    health = _npu_smi()
    return Finding("driver", f"{found[1] if found else 'version unknown'}; npu-smi {health}")


def _npu_smi() -> str:
    if shutil.which("npu-smi") is None:
        return "not found"
    try:
        done = subprocess.run(["npu-smi", "info"], capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "hangs: a device is stuck"
    return "answers" if done.returncode == 0 else f"fails with exit code {done.returncode}"


def _host() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("cores", f"{os.cpu_count()} ({platform.machine()})")
    is_small = memory.available < MIN_MEMORY_GIB * GIB
    yield Finding(
        "host memory",
        f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free",
        f"the smallest run wants {MIN_MEMORY_GIB} GiB: end something else" if is_small else "",
    )
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        remedy = "Ray keeps objects there: start the container with --shm-size=8g or more" if free < 2 * GIB else ""
        yield Finding("shared memory", f"{free / GIB:.1f} GiB free in {shared}", remedy)


def _disk(output_dir: Path) -> Iterator[Finding]:
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        yield Finding("disk", f"{folder} is not writable", "name another place with OUTPUT_DIR", is_fatal=True)
        return
    free = shutil.disk_usage(folder).free
    remedy = f"a default run wants {MIN_FREE_DISK_GIB} GiB: make room" if free < MIN_FREE_DISK_GIB * GIB else ""
    yield Finding("disk", f"{free / GIB:.0f} GiB free at {folder}", remedy)


def _jemalloc() -> Iterator[Finding]:
    library = jemalloc.find_library()
    if library is None:
        remedy = "optional: keeps host memory from fragmenting (Debian: libjemalloc2, openEuler: jemalloc)"
        yield Finding("jemalloc", "not installed", remedy)
    else:
        yield Finding("jemalloc", f"{library}{' (serves this process)' if jemalloc.is_loaded() else ''}")


def _network(options: Options) -> Iterator[Finding]:
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


def cann_version() -> str | None:
    """The CANN toolkit's version, from the folder that its environment names or from the usual ones."""
    for folder in (os.environ.get("ASCEND_HOME_PATH"), *CANN_FOLDERS):
        for path in sorted(Path(folder).glob("*-linux/ascend_toolkit_install.info")) if folder else []:
            found = re.search(r"^version=(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            if found:
                return found[1]
    return None


def version_of(package: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned(requirements: Path) -> dict[str, str]:
    """Package -> version of the exact pins in a requirements file."""
    text = requirements.read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==([\w.]+)", text, re.MULTILINE))


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table("", "what", "found", "what to do", show_lines=False)
    for finding in findings:
        table.add_row(finding.mark, finding.name, finding.value, finding.remedy)
    console.print(table)
    problems = sum(finding.is_fatal for finding in findings)
    console.print("A run would not start: see the problems above." if problems else "Ready for a run.")


if __name__ == "__main__":
    main()
