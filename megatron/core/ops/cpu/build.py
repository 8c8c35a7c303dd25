"""Build and load the kernels in csrc: compiled for this processor at first use, then kept in the user's cache.

``CXX`` names another compiler, ``XDG_CACHE_HOME`` another cache folder. The kernels run on torch's threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_formats import cpu_kernels

SOURCES = Path(__file__).with_name("csrc")
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


def kernels_problem() -> str | None:
    """Why there are no kernels; None when there are."""
    return cpu_kernels.kernels_problem(_kernels)


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
    advice = "or train with 'megatron.core.ops.reference:reference_ops'"
    build = cpu_kernels.cpu_kernels("the CPU kernels of the training engine", SOURCES, "megatron-cpu", advice)
    shared = build.load()
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
