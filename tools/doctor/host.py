"""The host: Python, packages, cores, memory, disk, allocator, and the model's tokenizer."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from hf_formats.cache_folder import cache_folder, moved_caches
from hf_formats.cores import usable_cores
from hf_formats.tokenizer import tokenizer_problem
from recipes.common.short_folder import environment_problem, folder_problem
from third_party import jemalloc
from tools.doctor.finding import GIB, ROOT, Finding, JobNeeds, stack_of_torch


def python() -> Iterator[Finding]:
    is_old = sys.version_info < (3, 11)
    remedy = "install Python 3.11 or newer and run tools/setup_env.sh" if is_old else ""
    yield Finding("python", f"{platform.python_version()} ({sys.executable})", remedy, is_fatal=is_old)


def packages() -> Iterator[Finding]:
    """The stack, by the torch that is installed, and the packages that its base.txt pins."""
    stack = stack_of_torch(version_of("torch"))
    pins = pinned(ROOT / stack.requirements / "base.txt")
    set_up = f"run STACK={stack.name} bash tools/setup_env.sh"
    yield Finding("stack", f"{stack.name}: torch {stack.torch}, torch_npu {stack.torch_npu}, CANN {stack.cann}")
    for name in ("torch", "ray", "transformers", "tensordict"):
        version = version_of(name)
        if version is None:
            yield Finding(name, "not installed", set_up, is_fatal=True)
        else:
            is_pinned = version.split("+")[0] == pins[name]
            yield Finding(name, version, "" if is_pinned else f"pinned is {pins[name]}: {set_up}")


def folders() -> Iterator[Finding]:
    """What other people's machines lack: the environment's folder, temporary files, caches and the compiler."""
    problem = environment_problem(sys.prefix)
    if problem is not None:
        yield Finding("environment", sys.prefix, problem, is_fatal=True)
    if os.pathsep in str(ROOT):
        remedy = "PYTHONPATH cannot name a folder with a colon: move the repository"
        yield Finding("repository", str(ROOT), remedy, is_fatal=True)
    problem = folder_problem()
    temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
    yield Finding("temporary files", temporary, problem or "", is_fatal=problem is not None)
    try:
        remedy = (
            "the home cannot hold libraries (read-only, or noexec): set HOME or XDG_CACHE_HOME, or they go to TMPDIR"
        )
        yield Finding("caches", str(cache_folder()), remedy if moved_caches() else "")
    except (ValueError, OSError) as error:
        yield Finding("caches", "none", str(error), is_fatal=True)
    compiler = os.environ.get("CXX") or "g++"
    found = shutil.which(compiler)
    remedy = "without it a run on a CPU is several times slower: install g++ 12 or newer, or name another in CXX"
    yield Finding("C++ compiler", found or f"no {compiler}", "" if found else remedy)


def memory(needs: JobNeeds) -> Iterator[Finding]:
    usable, all_of_them = usable_cores(), os.cpu_count() or 1
    limit = "" if usable == all_of_them else f" of {all_of_them}, by affinity or the container's quota"
    yield Finding("cores", f"{usable}{limit} ({platform.machine()})")
    found = psutil.virtual_memory()
    value = f"{found.available / GIB:.0f} of {found.total / GIB:.0f} GiB free"
    remedy, has_never = "", found.total < 0.9 * needs.memory_gib * GIB
    if found.available < needs.memory_gib * GIB:
        remedy = f"{needs.config} wants {needs.memory_gib} GiB free on every node: "
        remedy += "take a node that has them" if has_never else "end something else"
    yield Finding("host memory", value, remedy, is_fatal=has_never)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        remedy = "Ray keeps objects there: start the container with --shm-size=8g or more" if free < 2 * GIB else ""
        yield Finding("shared memory", f"{free / GIB:.1f} GiB free in {shared}", remedy)


def disk(output_dir: Path, needs: JobNeeds) -> Iterator[Finding]:
    """The disk that the run would write to."""
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "writable" if folder.is_dir() else "a folder"
        yield Finding("disk", f"{folder} is not {what}", "name another place with OUTPUT_DIR", is_fatal=True)
        return
    free = shutil.disk_usage(folder).free
    is_small = free < needs.disk_gib * GIB
    remedy = f"{needs.config} wants {needs.disk_gib} GiB: make room, or name another disk with OUTPUT_DIR"
    yield Finding("disk", f"{free / GIB:.0f} GiB free at {folder}", remedy if is_small else "", is_fatal=is_small)


def allocator() -> Iterator[Finding]:
    """Whether jemalloc is there."""
    library = jemalloc.find_library()
    if library is None:
        remedy = "optional: keeps host memory from fragmenting (Debian: libjemalloc2, openEuler: jemalloc)"
        yield Finding("jemalloc", "not installed", remedy)
    else:
        yield Finding("jemalloc", f"{library}{' (serves this process)' if jemalloc.is_loaded() else ''}")


def tokenizer(model_path: str | None) -> Iterator[Finding]:
    """The tokenizer of MODEL_PATH; nothing where it is not given, or is a hub's name and has not been fetched."""
    if not model_path or not Path(model_path).is_dir():
        return
    problem = tokenizer_problem(Path(model_path))
    yield Finding("tokenizer", model_path, problem or "", is_fatal=problem is not None)


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
