"""The plan that the launcher makes before anything starts: it refuses a run that cannot fit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from recipes.common.launcher.job import Job, config_path, model_dimensions, run_overrides
from recipes.common.launcher.processes import OwnProcesses
from recipes.common.recipe import ROOT

PLAN_DEVICE = "PLAN_DEVICE"
TIMEOUT_S = 900.0  # 671B on 256 dies: a minute of one core
# A word of torch's name of a GPU -> profile.
CUDA_PROFILES = (("GB200", "gb200"), ("H200", "h200"), ("H100", "h100"), ("H20", "h20"))
CPU_PROFILE = "cpu"
FITS, DOES_NOT_FIT = 0, 1


@dataclass(frozen=True)
class FirstPlan:
    """summary: a line for the user; problems: why the run cannot fit, empty when it can or when that is not known."""

    summary: str
    problems: tuple[str, ...] = ()


def first_plan(job: Job, environment: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> FirstPlan:
    """Plan the run in a process of its own. A run that cannot be planned is not refused; ``summary`` says why."""
    with tempfile.TemporaryDirectory(prefix="first-plan-") as folder:
        scratch = Path(folder)
        try:
            command = plan_command(job, environment, scratch)
        except ValueError as error:
            return FirstPlan(f"no plan: {error}")
        status, output = _run(command, environment, scratch / "output", timeout_s)
        result = scratch / "plan.json"
        if status not in (FITS, DOES_NOT_FIT) or not result.is_file():
            return FirstPlan(f"no plan: {_reason(status, output, timeout_s)}; the run starts without one")
        plan = json.loads(result.read_text(encoding="utf-8"))
    return FirstPlan(output.splitlines()[0], tuple(plan["problems"]))


def plan_command(job: Job, environment: Mapping[str, str], scratch: Path) -> list[str]:
    """The planner's command line; ValueError when the device is not known."""
    directory, name = config_path(job.settings)
    model = scratch / "model"
    model.mkdir()
    dimensions = {key: value for key, value in model_dimensions(job.settings).items() if key != "quantization_config"}
    (model / "config.json").write_text(json.dumps(dimensions), encoding="utf-8")
    given = [
        text
        for text in run_overrides(job.settings, job.rollout_nnodes)
        if not text.startswith("actor_rollout_ref.model.path=")
    ]
    return [
        *(job.python, "-m", "tools.plan", str(directory / f"{name}.yaml"), *given),
        *("--device", device_profile(job, environment, scratch), "--model", str(model)),
        *("--brief", "--output", str(scratch / "plan.json")),
    ]


def device_profile(job: Job, environment: Mapping[str, str], scratch: Path) -> str:
    """PLAN_DEVICE, or the profile of the run's device; a CPU's profile gets this machine's memory."""
    if environment.get(PLAN_DEVICE):
        return environment[PLAN_DEVICE]
    if job.device == "npu":
        return "a3"
    if job.device == "cuda":
        return cuda_profile(_gpu_name())
    path = scratch / "this_machine.toml"
    path.write_text(cpu_profile(psutil.virtual_memory().total, job.npus_per_node), encoding="utf-8")
    return str(path)


def cuda_profile(gpu_name: str) -> str:
    """The profile of a GPU by torch's name for it; ValueError when there is none."""
    words = re.split(r"[^A-Z0-9]+", gpu_name.upper())
    for part, profile in CUDA_PROFILES:
        if part in words:
            return profile
    raise ValueError(f"there is no device profile for {gpu_name!r}; set {PLAN_DEVICE} to a name or the path of one")


def cpu_profile(memory_bytes: int, num_workers: int) -> str:
    """The planner's profile of a CPU as TOML, where ``num_workers`` processes share ``memory_bytes``."""
    text = (ROOT / "tools" / "plan" / "devices" / f"{CPU_PROFILE}.toml").read_text(encoding="utf-8")
    gib = memory_bytes / 2**30
    values = {
        "memory_gib": f"{gib / num_workers:.3f}",
        "host_memory_gib": f"{gib:.3f}",
        "devices_per_node": str(num_workers),
        "domain_devices": str(num_workers),
    }
    lines = []
    for line in text.splitlines():
        key = line.partition("=")[0].strip()
        lines.append(f"{key} = {values[key]}" if key in values else line)
    return "\n".join(lines) + "\n"


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


def _run(command: list[str], environment: Mapping[str, str], log: Path, timeout_s: float) -> tuple[int | None, str]:
    """The planner's exit status (None: it took too long) and its output."""
    processes = OwnProcesses()
    path = os.pathsep.join([str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))])
    # The planner computes nothing: it needs no accelerator, and must not take one from the run.
    quiet = {
        "PYTHONPATH": path,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        process = processes.start(command, {**environment, **quiet}, output, ROOT)
        try:
            status: int | None = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            processes.end_all()
    return status, log.read_text(encoding="utf-8", errors="replace").strip()


def _reason(status: int | None, output: str, timeout_s: float) -> str:
    if status is None:
        return f"the planner took longer than {timeout_s:g} s"
    last = output.splitlines()[-1] if output else f"the planner ended with status {status} and no output"
    return last.removeprefix("error: ")
