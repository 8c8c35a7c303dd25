"""How the engines' C++ kernels for CPUs are built: for this processor, on the threads of torch."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from hf_formats.native_build import NativeBuild, compiler_of, has_program

_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")


@cache
def instructions() -> frozenset[str]:
    """Linux's names of what this processor can do; torch 2.5 has no function for it."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def target_flags() -> tuple[str, ...]:
    """A compiler's options for this processor."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    # Said again: a compiler older than the processor takes its family for another one.
    bfloat16 = ["-mavx512bf16"] if "avx512_bf16" in instructions() else []
    tiles = ["-mamx-tile", "-mamx-bf16"] if instructions() >= {"amx_bf16", "avx512_bf16"} else []
    return ("-march=native", "-mprefer-vector-width=512", *bfloat16, *tiles)


def cpu_kernels(what: str, sources: Path, folder: str, advice: str) -> NativeBuild:
    """The build of the folder ``sources``; see ``NativeBuild``. ``CXX`` names another compiler than g++."""
    # With another OpenMP library than torch's, each would keep threads of its own.
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]
    return NativeBuild(
        what=what,
        compiler=compiler_of("CXX", "g++"),
        flags=(*_FLAGS, *target_flags()),
        sources=tuple(sorted(sources.glob("*.cpp"))),
        headers=tuple(sorted(file for file in sources.iterdir() if file.suffix != ".cpp")),
        libraries=("-Wl,--as-needed", *map(str, openmp)),
        facts=tuple(sorted(instructions())),
        folder=folder,
        advice=f"install g++ 12 or newer, name another in CXX, {advice}",
    )


def kernels_problem(load: Callable[[], object]) -> str | None:
    """Why ``load`` has no kernels; None when it has. It builds them if need be, and fails once for a compiler."""
    compiler = compiler_of("CXX", "g++")
    if not has_program(compiler):
        return f"there is no C++ compiler (g++, or the one in CXX: {' '.join(compiler)!r})"
    return _build_problem(load, compiler)


@cache
def _build_problem(load: Callable[[], object], compiler: tuple[str, ...]) -> str | None:
    try:
        load()
    except RuntimeError as problem:
        return str(problem)
    return None
