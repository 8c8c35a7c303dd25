"""Build and load the kernels in csrc: compiled for this processor at first use, then kept in the user's cache.

``CXX`` names another compiler, ``XDG_CACHE_HOME`` another cache folder. The kernels run on torch's threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_formats.cache_folder import cache_folder
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


def has_compiler() -> bool:
    """Whether the compiler that builds the kernels is there."""
    return shutil.which(_compiler()) is not None


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
    shared = ctypes.CDLL(str(_build()))
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


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _build() -> Path:
    # With another OpenMP library than torch's, each would keep threads of its own.
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]
    command = [_compiler(), *_FLAGS, *target_flags(), "-shared"]
    advice = "use g++ 12 or newer, or train with 'megatron.core.ops.reference:reference_ops'"
    sources, headers = sorted(SOURCES.glob("*.cpp")), sorted(SOURCES.glob("*.h"))
    libraries = ["-Wl,--as-needed", *map(str, openmp)]
    return compiled(command, sources, "megatron-cpu", advice, headers=headers, libraries=libraries)


def target_flags() -> tuple[str, ...]:
    """A compiler's options for this processor."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return ("-march=native", "-mprefer-vector-width=512") if is_x86 else ("-mcpu=native",)


def compiled(
    command: list[str],
    sources: Sequence[Path],
    folder: str,
    advice: str,
    *,
    headers: Sequence[Path] = (),
    libraries: Sequence[str] = (),
) -> Path:
    """Return the library that ``command`` makes of ``sources``: from the user's cache, or built into it.

    Libraries are kept by what is in the files, wherever these are.

    Raises:
        RuntimeError: the compiler refuses them; ``advice`` says what can be done.
    """
    facts = repr((command, list(libraries), sorted(instructions()))).encode()
    facts += b"".join(file.read_bytes() for file in (*sources, *headers))
    target = cache_folder() / "r1-zero-ascend" / folder / f"kernels-{hashlib.sha256(facts).hexdigest()[:20]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there: processes that build at the same time never load half a file.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "kernels.so"
        made = [*command, *map(str, sources), *libraries, "-o", str(built)]
        result = subprocess.run(made, capture_output=True, text=True)
        if result.returncode != 0:
            said = result.stderr[-2000:]
            raise RuntimeError(f"{command[0]} cannot build {sources[0].parent}; {advice}. It said:\n{said}")
        os.replace(built, target)
    return target
