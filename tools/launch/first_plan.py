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

from hf_formats.cores import threads_per_worker
from tools.launch.job import Job, config_path, model_dimensions
from tools.launch.processes import OwnProcesses, python_path
from tools.launch.records import Records, files_of
from tools.plan.devices import load_device
from verl.trainer.config.load import to_yaml

TIMEOUT_S = 900.0  # 671B on 256 dies: a minute of one core
CUDA_PROFILES = ("GB200", "H200", "H100", "H20")  # words of torch's names of GPUs; in lower case, the profiles' names
FITS, DOES_NOT_FIT = 0, 1
RECORD = "plan"
DEVICE_FILE = "this_machine.toml"


@dataclass(frozen=True)
class FirstPlan:
    """summary: a line for the user; problems: why the run cannot fit, empty when it can or when that is not known."""

    summary: str
    problems: tuple[str, ...] = ()


def first_plan(job: Job, timeout_s: float = TIMEOUT_S, records: Records | None = None) -> FirstPlan:
    """Plan the run in a process of its own. A run that cannot be planned is not refused; ``summary`` says why.

    ``records`` keep the plan of a run that fits: it takes seconds, and the same run has the same plan.
    """
    with tempfile.TemporaryDirectory(prefix="first-plan-") as folder:
        scratch = Path(folder)
        try:
            command = plan_command(job, scratch, "--brief", "--output", str(scratch / "plan.json"))
        except ValueError as error:
            return FirstPlan(f"no plan: {error}")
        made_from = _made_from(job, command, scratch)
        if records is not None and (known := records.find(RECORD, *made_from)) is not None:
            return FirstPlan(known)
        try:
            lines = run_planner(command, scratch / "plan.json", timeout_s)
        except ValueError as error:
            return FirstPlan(f"no plan: {error}; the run starts without one")
        plan = FirstPlan(lines[0], tuple(json.loads((scratch / "plan.json").read_text(encoding="utf-8"))["problems"]))
        if records is not None and not plan.problems:
            records.write(RECORD, plan.summary, *made_from)
        return plan


def _made_from(job: Job, command: list[str], scratch: Path) -> list[object]:
    """Everything that a plan depends on: the run's config, the planner's command, and the files made for that."""
    arguments = [text.replace(str(scratch), "") for text in command]
    made = (scratch / "model" / "config.json", scratch / DEVICE_FILE)
    texts = [path.read_text(encoding="utf-8") for path in made if path.is_file()]
    given = [text for text in command if text == job.settings.plan_device]
    return [to_yaml(job.config), arguments, texts, files_of([str(Path(text).absolute()) for text in given])]


def plan_command(job: Job, scratch: Path, *options: str) -> list[str]:
    """The planner's command line for the run, with these options; ValueError when the device is not known."""
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
        *options,
    ]


def device_profile(job: Job, scratch: Path) -> str:
    """PLAN_DEVICE, or a file with the profile of the run's devices and this machine's memory."""
    if job.settings.plan_device is not None:
        return job.settings.plan_device
    memory_bytes = psutil.virtual_memory().total
    if job.device == "npu":
        text = npu_profile(job.settings.num_accelerators, memory_bytes)
    elif job.device == "cuda":
        import torch

        gpu = torch.cuda.get_device_properties(0)
        text = cuda_profile(gpu.name, gpu.total_memory, memory_bytes)
    else:
        text = cpu_profile(memory_bytes, job.npus_per_node)
    path = scratch / DEVICE_FILE
    path.write_text(text, encoding="utf-8")
    return str(path)


def npu_profile(num_dies: int, host_bytes: int) -> str:
    """A node of eight is an Atlas A2, any other an A3; they differ little within a node."""
    return _profile("a2" if 1 <= num_dies <= 8 else "a3", host_memory_gib=_gib(host_bytes))


def cuda_profile(gpu_name: str, memory_bytes: int, host_bytes: int) -> str:
    """The profile of a GPU by torch's name for it; another one has its own memory and an H100's rates."""
    for word in re.split(r"[^A-Z0-9]+", gpu_name.upper()):
        if word in CUDA_PROFILES:
            return _profile(word.lower(), host_memory_gib=_gib(host_bytes))
    name = f"{gpu_name}, timed as an H100"
    return _profile("h100", name=name, memory_gib=_gib(memory_bytes), host_memory_gib=_gib(host_bytes))


def cpu_profile(memory_bytes: int, num_workers: int) -> str:
    """A CPU where ``num_workers`` processes share ``memory_bytes`` and the cores."""
    core, threads = load_device("cpu"), threads_per_worker(num_workers)
    given: dict[str, object] = dict.fromkeys(("devices_per_node", "domain_devices"), num_workers)
    given["peak_bf16_tflops"] = core.peak_bf16_tflops * threads
    given["hbm_gbs"] = min(core.hbm_gbs * threads, core.host_memory_gbs)
    memory = {"memory_gib": _gib(memory_bytes / num_workers), "host_memory_gib": _gib(memory_bytes)}
    return _profile("cpu", **memory, **given)


def _profile(base: str, **values: object) -> str:
    """The planner's profile ``base`` as TOML, with these values in place of its own."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in {"like": base, **values}.items())


def _gib(num_bytes: float) -> float:
    return round(num_bytes / 2**30, 3)


def run_planner(command: list[str], result: Path, timeout_s: float = TIMEOUT_S) -> list[str]:
    """The lines that the planner prints when it has written ``result``, whether or not the run fits.

    ValueError with the reason where it has not.
    """
    processes, log = OwnProcesses(), result.with_name("output")
    # The planner computes nothing: it needs no accelerator, and must not take one from the run.
    quiet = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        with log.open("wb") as output:
            process = processes.start(command, {**os.environ, **quiet, "PYTHONPATH": python_path()}, output)
        status = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the planner took longer than {timeout_s:g} s") from None
    finally:
        processes.end_all()
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if status in (FITS, DOES_NOT_FIT) and result.is_file():
        return lines
    raise ValueError(
        lines[-1].removeprefix("error: ") if lines else f"the planner ended with status {status} and no output"
    )
