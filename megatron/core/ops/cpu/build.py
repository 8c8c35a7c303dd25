"""Build and load the kernels in csrc: compiled for this processor at first use, then kept in the user's cache.

``CXX`` names another compiler, ``XDG_CACHE_HOME`` another cache folder. The kernels run on torch's threads.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_formats.native_build import NativeBuild, compiler_of, has_program
from megatron.core.ops.cpu.instructions import instructions

SOURCES = Path(__file__).with_name("csrc")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
_TYPES = {"r": ctypes.c_void_p, "w": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float}
_SCHEMAS = {"r": "Tensor? {}", "w": "Tensor({}!)? {}", "l": "int {}", "f": "float {}"}
# r: a tensor that is read, w: one that is written, l: an integer, f: a float; dtype and number of threads follow.
_ARGUMENTS = {
    "rms_norm": "rrwwlllf",
    "rms_norm_grad": "rrrrwwlll",
    "swiglu": "rwll",
    "swiglu_grad": "rrwll",
    "rotary": "rrrwlllllf",
    "add_rows": "rrrwlll",
    "weighted_rows_grad": "rrrrwwlll",
    "log_sum_exp": "rwwlll",
    "cross_entropy_grad": "rrrrwlll",
    "adamw": "wrwwwllffffffff",
    "attention": "rrrrrwlllllfl",
    "attention_grad": "rrrrrrwwwlllllfl",
}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@cache
def build_problem(compiler: tuple[str, ...]) -> str | None:
    """Why ``compiler`` does not build the kernels; None when they are built and loaded."""
    try:
        _kernels()
    except RuntimeError as problem:
        return str(problem)
    return None


def kernels_problem() -> str | None:
    """Why there are no kernels; None when there are. It builds them if need be, and fails once for a compiler."""
    compiler = compiler_of("CXX", "g++")
    if not has_program(compiler):
        return f"there is no C++ compiler (g++, or the one in CXX: {' '.join(compiler)!r})"
    return build_problem(compiler)


def has_dtype(x: Tensor) -> bool:
    """Whether the kernels take tensors of x's dtype."""
    return x.dtype in _DTYPES


def run(name: str, dtype: torch.dtype, *arguments: Tensor | float | None) -> None:
    """Run a kernel for tensors of ``dtype``; on meta tensors, where plans are made, nothing runs.

    Kernels are torch operations, so that profiles see them. RuntimeError: the compiler refuses the source.
    """
    _kernels()[name](*arguments, _DTYPES[dtype], torch.get_num_threads())


@cache
def _kernels() -> dict[str, Any]:
    """The operations of the namespace ``megatron_cpu``; the library that defines them lives as long as the process."""
    shared = _build().load()
    library = torch.library.Library("megatron_cpu", "DEF")
    for name, form in _ARGUMENTS.items():
        function = getattr(shared, f"cpu_{name}")
        function.argtypes = [*(_TYPES[letter] for letter in form), ctypes.c_long, ctypes.c_int]
        function.restype = None
        places = ", ".join(_SCHEMAS[letter].format(*[f"a{i}"] * 2) for i, letter in enumerate(form))
        library.define(f"{name}({places}, int dtype, int threads) -> ()")
        library.impl(name, partial(_call, function), "CPU")
        library.impl(name, lambda *_: None, "Meta")
    operations = {name: getattr(torch.ops.megatron_cpu, name).default for name in _ARGUMENTS}
    return operations | {"library": library}


def _call(function: Callable[..., None], *arguments: Tensor | float | None) -> None:
    function(*[one.data_ptr() if isinstance(one, Tensor) else one for one in arguments])


def _build() -> NativeBuild:
    # With another OpenMP library than torch's, each would keep threads of its own.
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]
    return NativeBuild(
        what="the CPU kernels of the training engine",
        compiler=compiler_of("CXX", "g++"),
        flags=(*_FLAGS, *target_flags()),
        sources=tuple(sorted(SOURCES.glob("*.cpp"))),
        headers=tuple(sorted(SOURCES.glob("*.h"))),
        libraries=("-Wl,--as-needed", *map(str, openmp)),
        facts=tuple(sorted(instructions())),
        folder="megatron-cpu",
        advice="install g++ 12 or newer, or train with 'megatron.core.ops.reference:reference_ops'",
    )


def target_flags() -> tuple[str, ...]:
    """A compiler's options for this processor."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return ("-march=native", "-mprefer-vector-width=512") if is_x86 else ("-mcpu=native",)
