"""Ascend: dies, driver, CANN and torch_npu, and whether their versions fit together."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.doctor import links
from tools.doctor.finding import Finding, Stack, load_table
from tools.doctor.host import version_of
from vllm_ascend import versions
from vllm_ascend.versions import cann_version, driver_version, numbers

DEVICES = Path("/dev")


def findings() -> Iterator[Finding]:
    """Findings about the NPUs; a machine without dies has one line."""
    found = dies()
    torch_npu = version_of("torch-npu")
    if not found:
        yield Finding("NPUs", "none: runs use GPUs, or the CPU")
        if torch_npu:
            yield Finding("torch_npu", torch_npu)
        return
    yield Finding("NPUs", f"{len(found)} dies")
    yield _npu_smi()
    stack = next((stack for stack in load_table()[0] if stack.torch_npu == torch_npu), None)
    yield _torch_npu(torch_npu, stack)
    yield _driver(stack)
    yield _cann(stack)
    yield links.die_links(found)
    yield links.hccl_ports()
    yield links.hccl_expansion(cann_version())
    if apex := version_of("apex"):
        why = "its fused AdamW keeps the state itself, and ours is sharded and swapped; torch's fused AdamW is used"
        yield Finding("apex", f"{apex}, not used: {why}")


def dies() -> list[int]:
    """The numbers of the dies that this machine shows."""
    return sorted(int(path.name[7:]) for path in DEVICES.glob("davinci[0-9]*"))


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
        remedy = f"not among the tested ones ({known}): run tools/setup_env.sh in a new VENV_DIR"
        return Finding("torch_npu", found, remedy)
    torch = version_of("torch")
    if torch is not None and torch.split("+")[0] != stack.torch:
        remedy = f"wants torch {stack.torch}, here is {torch}: run STACK={stack.name} bash tools/setup_env.sh"
        return Finding("torch_npu", found, remedy, is_fatal=True)
    return Finding("torch_npu", found)


def _driver(stack: Stack | None) -> Finding:
    version = driver_version()
    if version is None:
        missing = versions.DRIVER_VERSION_FILE
        return Finding("driver", "version unknown", f"no {missing}: mount the driver into the container")
    old = []
    if stack is not None and numbers(version) < numbers(stack.driver):
        old.append(f"older than {stack.driver}, which belongs to torch_npu {stack.torch_npu}")
    needed = versions.NEEDED_BY_GRAPHS["driver"]
    if numbers(version) < numbers(needed):
        old.append(f"older than {needed}, which graphs of decode steps need (enforce_eager)")
    elif numbers(version) < numbers(versions.DRIVER_WITH_STREAMS):
        old.append(f"older than {versions.DRIVER_WITH_STREAMS}: few graphs fit its streams (cudagraph_capture_sizes)")
    return Finding("driver", version, f"{'; '.join(old)}: update driver and firmware" if old else "")


def _cann(stack: Stack | None) -> Finding:
    version = cann_version()
    if version is None:
        remedy = f"install it, or source its set_env.sh; looked in {', '.join(versions.CANN_FOLDERS)}"
        return Finding("CANN", "not found", remedy, is_fatal=True)
    remedy = ""
    if stack is not None and numbers(version)[:2] != numbers(stack.cann)[:2]:
        remedy = (
            f"torch_npu {stack.torch_npu} belongs to CANN {stack.cann}: use an image with that CANN (CANN_IMAGE of the "
            "Dockerfile), or make another environment with the STACK of this CANN (docs/installation.md)"
        )
    return Finding("CANN", version, remedy)
