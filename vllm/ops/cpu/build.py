"""Build and load the CPU kernels in csrc: compiled for this processor at first use, then kept in the user's cache.

`CXX` names another compiler, `XDG_CACHE_HOME` another cache folder. The library shares torch's threads:
torch.set_num_threads sets their number.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from struct import Struct

import torch

from hf_formats.cache_folder import cache_folder

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
    library = ctypes.CDLL(str(_build()))
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
    return shutil.which(_compiler()) is not None


@cache
def instructions() -> frozenset[str]:
    """Linux's names of what this processor can do; torch 2.5 has no function for it."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _build() -> Path:
    compiler = _compiler()
    if not has_compiler():
        raise RuntimeError(
            f"the CPU kernels of the rollout engine need a C++ compiler with OpenMP, and {compiler!r} is not found: "
            f"install g++ 12 or newer, name another in CXX, {OTHER_TABLE}"
        )
    command, libraries = [compiler, *_FLAGS, *_target_flags()], _openmp_of_torch()
    target = _cache_dir() / f"kernels-{_fingerprint([*command, *libraries])}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there: no process loads half a file.
    with _one_builder(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        if target.is_file():
            return target
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor() as pool:  # each waits for a compiler
            made = zip(sources, objects, strict=True)
            list(pool.map(lambda one: _run([*command, "-c", str(one[0]), "-o", one[1]], str(one[0])), made))
        built = Path(scratch) / "kernels.so"
        _run([*command, "-shared", *objects, *libraries, "-o", str(built)], str(SOURCES))
        os.replace(built, target)
    return target


@contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Wait for a process that builds in this folder; ranks that start together would all build the same."""
    with (folder / "building").open("w") as file:
        with suppress(OSError):  # a file system without locks: all build, and the last one's library stays
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str], source: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"{command[0]} cannot build the CPU kernels ({source}): use g++ 12 or newer, {OTHER_TABLE}. It said:\n"
            f"{result.stderr[-2000:]}"
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


def _fingerprint(command: list[str]) -> str:
    digest = hashlib.sha256(repr((command, sorted(instructions()))).encode())
    version = subprocess.run([command[0], "-dumpfullversion"], capture_output=True, text=True, check=False)
    digest.update(version.stdout.encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


def _cache_dir() -> Path:
    return cache_folder() / "r1-zero-ascend" / "vllm-cpu"
