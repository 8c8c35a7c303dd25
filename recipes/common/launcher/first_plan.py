"""The plan that the launcher makes before anything starts: it refuses a run that cannot fit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from recipes.common.launcher.job import Job, config_path, model_dimensions
from recipes.common.launcher.processes import OwnProcesses, python_path
from recipes.common.recipe import ROOT

TIMEOUT_S = 900.0  # 671B on 256 dies: a minute of one core
CUDA_PROFILES = ("GB200", "H200", "H100", "H20")  # words of torch's names of GPUs; in lower case, the profiles' names
FITS, DOES_NOT_FIT = 0, 1


@dataclass(frozen=True)
class FirstPlan:
    """summary: a line for the user; problems: why the run cannot fit, empty when it can or when that is not known."""

    summary: str
    problems: tuple[str, ...] = ()


def first_plan(job: Job, timeout_s: float = TIMEOUT_S) -> FirstPlan:
    """Plan the run in a process of its own. A run that cannot be planned is not refused; ``summary`` says why."""
    with tempfile.TemporaryDirectory(prefix="first-plan-") as folder:
        scratch = Path(folder)
        try:
            command = plan_command(job, scratch)
        except ValueError as error:
            return FirstPlan(f"no plan: {error}")
        status, lines = _run(command, scratch / "output", timeout_s)
        result = scratch / "plan.json"
        if status in (FITS, DOES_NOT_FIT) and result.is_file():
            return FirstPlan(lines[0], tuple(json.loads(result.read_text(encoding="utf-8"))["problems"]))
    if status is None:
        reason = f"the planner took longer than {timeout_s:g} s"
    else:
        reason = lines[-1].removeprefix("error: ") if lines else f"the planner ended with status {status} and no output"
    return FirstPlan(f"no plan: {reason}; the run starts without one")


def plan_command(job: Job, scratch: Path) -> list[str]:
    """The planner's command line; ValueError when the device is not known."""
    directory, name = config_path(job.settings)
    model = scratch / "model"
    model.mkdir()
    dimensions = {key: value for key, value in model_dimensions(job.settings).items() if key != "quantization_config"}
    (model / "config.json").write_text(json.dumps(dimensions), encoding="utf-8")
    overrides = job.overrides
    return [
        *(sys.executable, "-m", "tools.plan", str(directory / f"{name}.yaml")),
        *(text for text in overrides if not text.startswith("actor_rollout_ref.model.path=")),
        *("--device", device_profile(job, scratch), "--model", str(model)),
        *("--brief", "--output", str(scratch / "plan.json")),
    ]


def device_profile(job: Job, scratch: Path) -> str:
    """PLAN_DEVICE, or the profile of the run's device; a CPU's profile gets this machine's memory."""
    if job.settings.plan_device is not None:
        return job.settings.plan_device
    if job.device == "npu":
        return "a3"
    if job.device == "cuda":
        import torch

        return cuda_profile(torch.cuda.get_device_name(0))
    path = scratch / "this_machine.toml"
    path.write_text(cpu_profile(psutil.virtual_memory().total, job.npus_per_node), encoding="utf-8")
    return str(path)


def cuda_profile(gpu_name: str) -> str:
    """The profile of a GPU by torch's name for it; ValueError when there is none."""
    for word in re.split(r"[^A-Z0-9]+", gpu_name.upper()):
        if word in CUDA_PROFILES:
            return word.lower()
    raise ValueError(f"there is no device profile for {gpu_name!r}; set PLAN_DEVICE to a name or the path of one")


def cpu_profile(memory_bytes: int, num_workers: int) -> str:
    """The planner's profile of a CPU as TOML, where ``num_workers`` processes share ``memory_bytes``."""
    text = (ROOT / "tools" / "plan" / "devices" / "cpu.toml").read_text(encoding="utf-8")
    gib = memory_bytes / 2**30
    values = {"memory_gib": f"{gib / num_workers:.3f}", "host_memory_gib": f"{gib:.3f}"}
    values |= dict.fromkeys(("devices_per_node", "domain_devices"), str(num_workers))
    for key, value in values.items():
        text = re.sub(rf"^{key} *=.*", f"{key} = {value}", text, flags=re.MULTILINE)
    return text


def _run(command: list[str], log: Path, timeout_s: float) -> tuple[int | None, list[str]]:
    """The planner's exit status (None: it took too long) and the lines that it printed."""
    processes = OwnProcesses()
    # The planner computes nothing: it needs no accelerator, and must not take one from the run.
    quiet = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    status = None
    try:
        with log.open("wb") as output:
            process = processes.start(command, {**os.environ, **quiet, "PYTHONPATH": python_path()}, output)
        status = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        processes.end_all()
    return status, log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
