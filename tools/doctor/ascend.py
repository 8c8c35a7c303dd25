"""Ascend: dies, driver, CANN and torch_npu, and whether their versions fit together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.doctor import links
from tools.doctor.finding import Finding, Stack, load_table
from tools.doctor.host import version_of

DEVICES = Path("/dev")
CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")
DRIVER_VERSION_FILE = Path("/usr/local/Ascend/driver/version.info")


def findings() -> Iterator[Finding]:
    """Findings about the NPUs; a machine without dies has one line."""
    dies = sorted(int(path.name[7:]) for path in DEVICES.glob("davinci[0-9]*"))
    torch_npu = version_of("torch-npu")
    if not dies:
        yield Finding("NPUs", "none: runs use the CPU")
        if torch_npu:
            yield Finding("torch_npu", torch_npu)
        return
    yield Finding("NPUs", f"{len(dies)} dies")
    yield _npu_smi()
    stack = next((stack for stack in load_table()[0] if stack.torch_npu == torch_npu), None)
    yield _torch_npu(torch_npu, stack)
    yield _driver(stack)
    yield _cann(stack)
    yield links.die_links(dies)
    yield links.hccl_ports()
    yield links.hccl_expansion(cann_version())


def cann_version() -> str | None:
    """The CANN toolkit's version, from the folder in its environment variable or from the usual ones."""
    folders = [Path(folder) for folder in (os.environ.get("ASCEND_HOME_PATH"), *CANN_FOLDERS) if folder]
    files = (path for folder in folders for path in sorted(folder.glob("*-linux/ascend_toolkit_install.info")))
    return next(filter(None, map(_version_in, files)), None)


def driver_version() -> str | None:
    """The driver's version; None when its file is not mounted or has no version."""
    return _version_in(DRIVER_VERSION_FILE) if DRIVER_VERSION_FILE.is_file() else None


def _version_in(file: Path) -> str | None:
    found = re.search(r"^version=(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE | re.IGNORECASE)
    return found[1].strip() if found else None


def _npu_smi() -> Finding:
    if shutil.which("npu-smi") is None:
        return Finding("npu-smi", "not found", "mount /usr/local/bin/npu-smi and /usr/local/dcmi into the container")
    try:
        done = subprocess.run(["npu-smi", "info"], capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return Finding("npu-smi", "hangs", "a die is stuck: reset it, or leave this node out", is_fatal=True)
    if done.returncode:
        remedy = "driver and firmware do not answer: reinstall them, then restart the machine"
        return Finding("npu-smi", f"exit code {done.returncode}", remedy, is_fatal=True)
    return Finding("npu-smi", "answers")


def _torch_npu(found: str | None, stack: Stack | None) -> Finding:
    if found is None:
        remedy = "run tools/setup_env.sh: it adds torch_npu where it sees NPUs"
        return Finding("torch_npu", "not installed", remedy, is_fatal=True)
    if stack is None:
        known = ", ".join(row.torch_npu for row in load_table()[0])
        remedy = f"not among the tested ones ({known}): install the one of requirements/npu.txt"
        return Finding("torch_npu", found, remedy)
    torch = version_of("torch")
    if torch is not None and torch.split("+")[0] != stack.torch:
        remedy = f"wants torch {stack.torch}, here is {torch}: run tools/setup_env.sh"
        return Finding("torch_npu", found, remedy, is_fatal=True)
    return Finding("torch_npu", found)


def _driver(stack: Stack | None) -> Finding:
    version = driver_version()
    if version is None:
        return Finding("driver", "version unknown", f"no {DRIVER_VERSION_FILE}: mount the driver into the container")
    remedy = ""
    if stack is not None and _numbers(version) < _numbers(stack.driver):
        remedy = f"older than {stack.driver}, which belongs to torch_npu {stack.torch_npu}: update driver and firmware"
    return Finding("driver", version, remedy)


def _cann(stack: Stack | None) -> Finding:
    version = cann_version()
    if version is None:
        remedy = f"install it, or source its set_env.sh; looked in {', '.join(CANN_FOLDERS)}"
        return Finding("CANN", "not found", remedy, is_fatal=True)
    remedy = ""
    if stack is not None and _numbers(version)[:2] != _numbers(stack.cann)[:2]:
        remedy = (
            f"torch_npu {stack.torch_npu} belongs to CANN {stack.cann}: use an image with that CANN (CANN_IMAGE of the "
            "Dockerfile), or the torch_npu of this CANN"
        )
    return Finding("CANN", version, remedy)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: 8.2.RC1 is (8, 2)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
