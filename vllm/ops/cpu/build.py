"""Build and load the CPU kernels in csrc: compiled for this processor at first use, then kept in the user's cache.

`CXX` names another compiler, `XDG_CACHE_HOME` another cache folder. The library shares torch's threads:
torch.set_num_threads sets their number.
"""

from __future__ import annotations

import ctypes
import platform
import re
from functools import cache
from pathlib import Path
from struct import Struct

import torch

from hf_formats.native_build import NativeBuild, compiler_of, has_program

SOURCES = Path(__file__).parent / "csrc"
OTHER_TABLE = "or set rollout_ops='vllm.ops.reference:rollout_ops' (plain torch, several times slower)"
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
_P, _L = ctypes.c_void_p, ctypes.c_long
_ARGUMENTS = {  # q: an integer or an address, d: a float; in the order of KERNELS in csrc/kernels.cpp
    "cpu_head_linear": "14q",
    "cpu_mla_attention": "16qdq",
    "cpu_gqa_attention": "15qdq",
    "cpu_fused_experts": "15q",
    "cpu_topk_router": "8qd3q",
    "cpu_rms_norm": "6qdq",
    "cpu_add_rms_norm": "6qdq",
    "cpu_silu_and_mul": "6q",
    "cpu_rotary": "10q",
    "cpu_write_kv": "8qd3q",
    "cpu_rope_write_gqa": "13qd5q",
    "cpu_sample": "8q",
    "cpu_add": "5q",
    "cpu_widen": "3q",
    "cpu_take_rows": "5q",
    "cpu_take_panel_rows": "5q",
}
_CALLS = {name: (number, Struct("q" + form)) for number, (name, form) in enumerate(_ARGUMENTS.items())}


def call_of(name: str, *arguments: float) -> bytes:
    """The words by which `cpu_run` calls a kernel: its number and its arguments."""
    number, form = _CALLS[name]
    return form.pack(number, *arguments)


@cache
def kernels() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        RuntimeError: there is no compiler, or it refuses the sources.
    """
    library = _native_build().load()
    library.cpu_run.argtypes, library.cpu_run.restype = [_L, ctypes.c_char_p], None
    library.cpu_digest.argtypes, library.cpu_digest.restype = [_P, _P, *[_L] * 5, _P, _P], None
    library.cpu_compressed_bytes.argtypes, library.cpu_compressed_bytes.restype = [_L, _L], _L
    library.cpu_compress.argtypes, library.cpu_compress.restype = [_P, _L, _L, _L, _P], ctypes.c_int
    library.cpu_decompress.argtypes, library.cpu_decompress.restype = [_P, _L, _L, _P], None
    library.cpu_pack_panels.argtypes, library.cpu_pack_panels.restype = [_P, _L, _L, _L, _P], None
    library.cpu_unpack_panels.argtypes, library.cpu_unpack_panels.restype = [_P, _L, _L, _P], None
    library.cpu_copy_digest.argtypes, library.cpu_copy_digest.restype = [*[_P] * 4, *[_L] * 6, _P, _P], None
    return library


def has_compiler() -> bool:
    """Whether the compiler that ``kernels`` would call is there."""
    return has_program(compiler_of("CXX", "g++"))


@cache
def build_problem(compiler: tuple[str, ...]) -> str | None:
    """Why ``compiler`` does not build the kernels; None when they are built and loaded."""
    try:
        kernels()
    except RuntimeError as problem:
        return str(problem)
    return None


def kernels_problem() -> str | None:
    """Why there are no kernels; None when there are. It builds them if need be, and fails once for a compiler."""
    compiler = compiler_of("CXX", "g++")
    return build_problem(compiler) if has_compiler() else f"no C++ compiler (g++, or the one in CXX): {compiler[0]!r}"


@cache
def instructions() -> frozenset[str]:
    """Linux's names of what this processor can do; torch 2.5 has no function for it."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _build() -> Path:
    return _native_build().path()


def _native_build() -> NativeBuild:
    return NativeBuild(
        what="the CPU kernels of the rollout engine",
        compiler=compiler_of("CXX", "g++"),
        flags=(*_FLAGS, *_target_flags()),
        sources=tuple(sorted(SOURCES.glob("*.cpp"))),
        headers=tuple(sorted(file for file in SOURCES.iterdir() if file.suffix != ".cpp")),
        libraries=tuple(_openmp_of_torch()),
        facts=tuple(sorted(instructions())),
        folder="vllm-cpu",
        advice=f"install g++ 12 or newer, name another in CXX, {OTHER_TABLE}",
    )


def _target_flags() -> list[str]:
    if platform.machine() in ("x86_64", "AMD64"):
        # Said again: a compiler older than the processor takes its family for another one.
        bfloat16 = ["-mavx512bf16"] if "avx512_bf16" in instructions() else []
        tiles = ["-mamx-tile", "-mamx-bf16"] if instructions() >= {"amx_bf16", "avx512_bf16"} else []
        return ["-fPIC", "-march=native", "-mprefer-vector-width=512", *bfloat16, *tiles]
    return ["-fPIC", "-mcpu=native"]


def _openmp_of_torch() -> list[str]:
    """Link flags for the OpenMP library that torch has loaded: with another, each would keep its own threads."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return ["-Wl,--as-needed", str(found[0])] if found else []
