"""NVIDIA: GPUs, driver, CUDA and what their tool reports of errors, clocks and memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.doctor import nvidia_links
from tools.doctor.finding import Finding, JobNeeds
from tools.doctor.host import version_of
from tools.doctor.nvidia_smi import SLOWDOWNS, Gpu, SmiError, is_present, query_gpus, run, table
from vllm_ascend.versions import numbers

GPU_DAY = "python -m tools.workshop.gpu_day --out DIR"
SET_UP = "run bash tools/setup_env.sh"
# The oldest driver of each major version of CUDA (docs.nvidia.com/deploy/cuda-compatibility).
OLDEST_DRIVER = {13: 580, 12: 525, 11: 450}
OLDEST_CAPABILITY, FP8_CAPABILITY = (8, 0), (9, 0)  # bfloat16 and asynchronous copies; products of e4m3
USED_MIB = 1024  # more than a display and the driver take
LIBRARIES = ("flash_mla", "deep_gemm", "deep_ep")


def findings(needs: JobNeeds) -> Iterator[Finding]:
    """Findings about the GPUs; a machine without any has one line."""
    is_asked_for = needs.device == "cuda"  # others use the CPU where torch sees no GPU
    if not is_present():
        yield Finding("GPUs", "none")
        return
    try:
        gpus = query_gpus()
    except SmiError as error:
        remedy = (
            "the driver does not answer: install it or restart the machine; in a container, start it with --gpus all"
        )
        yield Finding("nvidia-smi", str(error), remedy, is_asked_for)
        return
    names = sorted({gpu.values["name"] for gpu in gpus})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}"
    yield Finding("GPUs", f"{len(gpus)} x {', '.join(names)}{shown}")
    cuda = torch_cuda()
    yield _torch(cuda, is_asked_for)
    yield _driver(gpus[0].values["driver_version"], cuda, is_asked_for)
    yield _triton()
    yield Finding("NCCL", version_of(f"nvidia-nccl-cu{cuda.split('.')[0]}") or "torch's own" if cuda else "none")
    yield _libraries()
    yield _capability(gpus)
    yield from _health(gpus)
    yield from nvidia_links.findings(len(gpus))
    yield Finding("ops on these GPUs", f"not run here: `{GPU_DAY}` compares them with their references and times them")


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def _torch(cuda: str | None, is_asked_for: bool) -> Finding:
    if cuda is None:
        remedy = f"{SET_UP} in a new VENV_DIR: it takes torch's build for CUDA where it sees an NVIDIA driver"
        return Finding("CUDA of torch", "none: torch is missing, or built for the CPU alone", remedy, is_asked_for)
    return Finding("CUDA of torch", cuda)


def _driver(version: str, cuda: str | None, is_asked_for: bool) -> Finding:
    needed = OLDEST_DRIVER.get(int(cuda.split(".")[0])) if cuda else None
    if needed is None or numbers(version) >= (needed,):
        return Finding("NVIDIA driver", version)
    remedy = f"older than {needed}, which torch's CUDA {cuda} needs: update the driver, or take a node that has it"
    return Finding("NVIDIA driver", version, remedy, is_asked_for)


def _triton() -> Finding:
    """Whether the Triton is there that torch was released with."""
    found = version_of("triton")
    if found is None:
        return Finding("triton", "not installed", f"the ops for CUDA need it: {SET_UP}", is_fatal=True)
    try:
        required = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    pins = [match[1] for line in required if (match := re.match(r"triton\s*==\s*([\w.]+)", line))]
    remedy = f"torch names {pins[0]}: {SET_UP}" if pins and found.split("+")[0] not in pins else ""
    return Finding("triton", found, remedy)


def _libraries() -> Finding:
    """The optional libraries, which a config asks for by name."""
    shown = []
    for name in LIBRARIES:
        is_there = importlib.util.find_spec(name) is not None
        shown.append(f"{name} {version_of(name) or ('found' if is_there else 'not installed')}")
    return Finding("optional libraries", f"{', '.join(shown)}; docs/installation.md says what uses them")


def _capability(gpus: Sequence[Gpu]) -> Finding:
    lowest = min(gpu.capability for gpu in gpus)
    value = f"sm_{''.join(map(str, lowest))}"
    if lowest < OLDEST_CAPABILITY:
        remedy = "the ops for CUDA need sm_80 (A100) or newer: take other GPUs, or set trainer.device=cpu"
        return Finding("compute capability", value, remedy, is_fatal=True)
    return Finding("compute capability", value if lowest >= FP8_CAPABILITY else f"{value}: FP8 products need sm_90")


def _health(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """What a GPU reports of itself, a line for each question."""

    def has(field: str, text: str) -> Callable[[Gpu], str]:
        return lambda gpu: text if gpu.values[field] == text else ""

    def errors(gpu: Gpu) -> str:
        count = gpu.number("ecc.errors.uncorrected.volatile.total")
        return f"{count:.0f} uncorrected since the last reset" if count else ""

    def slowed(gpu: Gpu) -> str:
        return ", ".join(name for name in SLOWDOWNS if gpu.values[f"clocks_event_reasons.{name}"] == "Active")

    def limited(gpu: Gpu) -> str:
        limit, default = gpu.number("power.limit"), gpu.number("power.default_limit")
        return f"{limit:.0f} of {default:.0f} W" if limit and default and limit < default else ""

    def used(gpu: Gpu) -> str:
        used_mib = gpu.number("memory.used") or 0
        return f"{used_mib:.0f} of {gpu.values['memory.total']} MiB used" if used_mib > USED_MIB else ""

    yield _of_each(gpus, "GPU memory", used, f"end what holds it ({_holders()}), or leave the GPU out")
    yield _of_each(
        gpus, "ECC errors", errors, "reset the GPU (nvidia-smi --gpu-reset -i N); if they return, leave it out"
    )
    yield from _remapped_rows()
    yield _of_each(gpus, "GPU clocks", slowed, "too hot, or short of power: see cooling and supply, or leave it out")
    yield _of_each(gpus, "power limit", limited, "products take longer: set the default (nvidia-smi -i N -pl WATTS)")
    yield _of_each(
        gpus, "MIG", has("mig.mode.current", "Enabled"), "a run takes whole GPUs: nvidia-smi -i N -mig 0", is_fatal=True
    )
    remedy = "the driver loads again at each start: nvidia-smi -pm 1, or nvidia-persistenced"
    yield _of_each(gpus, "persistence mode", has("persistence_mode", "Disabled"), remedy)


def _of_each(
    gpus: Sequence[Gpu], name: str, problem: Callable[[Gpu], str], remedy: str, is_fatal: bool = False
) -> Finding:
    found = [f"{gpu}: {text}" for gpu in gpus if (text := problem(gpu))]
    return Finding(name, "; ".join(found), remedy, is_fatal) if found else Finding(name, "ok")


def _holders() -> str:
    """The processes with memory on a GPU, as far as the driver shows them: not those outside a container."""
    try:
        rows = list(table(run("--query-compute-apps=pid,process_name", "--format=csv,noheader")))
    except SmiError:
        rows = []
    return ", ".join(f"pid {pid} {Path(name).name}" for pid, name in rows) or "outside this container"


def _remapped_rows() -> Iterator[Finding]:
    """Rows of memory that the GPU has replaced, or could not replace."""
    name = "remapped rows"
    fields = "remapped_rows.pending,remapped_rows.failure"
    try:
        rows = list(table(run(f"--query-remapped-rows={fields}", "--format=csv,noheader")))
    except SmiError as error:
        yield Finding(name, f"unknown: nvidia-smi: {error}", "nothing, where these GPUs remap no rows")
        return
    pending, failed = ([i for i, row in enumerate(rows) if row[column] in ("Yes", "1")] for column in (0, 1))
    if failed:
        yield Finding(name, f"GPU {_list(failed)}: failed", "its memory is defective: leave it out", is_fatal=True)
    if pending:
        yield Finding(name, f"GPU {_list(pending)}: pending", "reset the GPU (nvidia-smi --gpu-reset -i N) to remap")
    if not failed and not pending:
        yield Finding(name, "ok")


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
