"""The loops that copy weights and compute checksums: C, compiled at first use and cached, or torch and zlib.

Both give the same bits. ``CC`` names another compiler, ``XDG_CACHE_HOME`` another directory for the compiled library.
"""

from __future__ import annotations

import ctypes
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hf_formats.cpu_kernels import instructions, target_flags
from hf_formats.fp8 import BLOCK, Fp8Blocks, row_scales
from hf_formats.native_build import NativeBuild, compiler_of
from mindspeed_llm.weight_source import CopyValues, Origin, copy_values

logger = logging.getLogger(__name__)

KernelsName = Literal["native", "torch"]
_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-fPIC")
_LIMIT_S = 120.0  # for one short file
_CRC_LEAST = 64
_P, _L = ctypes.c_void_p, ctypes.c_long


@dataclass(frozen=True)
class Kernels:
    """``copy`` writes the values of a shard, ``crc32(bytes, so_far)`` is zlib's."""

    copy: CopyValues
    crc32: Callable[[memoryview, int], int]


def choose_kernels(asked: Literal["auto", "native", "torch"]) -> KernelsName:
    """``asked``; "auto" is native where they can be built, else torch, with a warning.

    It builds the library now, so that a failure shows early; all processes of a node share one build.
    """
    if asked != "auto":
        load_kernels(asked)
        return asked
    problem = _build_problem(compiler_of("CC", "cc"))
    if problem is None:
        return "native"
    logger.warning("weights are copied by torch, with the same bits and several times slower: %s", problem)
    return "torch"


@cache
def _build_problem(compiler: tuple[str, ...]) -> str | None:
    """Why ``compiler`` does not build the library; it is asked once."""
    try:
        load_kernels("native")
    except ValueError as problem:
        return str(problem)
    return None


def load_kernels(name: KernelsName) -> Kernels:
    """The loops of that name; ValueError when they cannot be built."""
    if name == "torch":
        return Kernels(copy_values, zlib.crc32)
    return Kernels(copy_native, crc32_native if hasattr(_library(), "crc32_blocks") else zlib.crc32)


def crc32_native(data: memoryview, so_far: int) -> int:
    """zlib.crc32 of contiguous bytes, by carry-less products (the library has it for processors that have these)."""
    whole = data.nbytes - data.nbytes % 16
    if whole < _CRC_LEAST:
        return zlib.crc32(data, so_far)
    address = np.frombuffer(data, dtype=np.uint8).ctypes.data
    crc: int = _library().crc32_blocks(address, whole, so_far)
    return zlib.crc32(data[whole:], crc)


def copy_native(target: Tensor, values: Tensor, scale_inv: Tensor | None, origin: Origin) -> None:
    """``copy_values`` with C loops that dequantise FP8 to BF16 (scales must be finite) and transpose 2-byte elements;
    all other cases are passed to ``copy_values``."""
    is_transposed = target.dim() == 2 and target.stride(0) == 1 and target.stride(1) > 1
    if values.dim() == 2 and values.stride(1) != 1:
        values = values.contiguous()
    if scale_inv is not None and target.dtype == torch.bfloat16 and (is_transposed or target.stride(1) == 1):
        _dequantize(target, values, scale_inv, origin, is_transposed)
    elif scale_inv is None and is_transposed and target.dtype == values.dtype and target.element_size() == 2:
        _transpose(target, values)
    else:
        copy_values(target, values, scale_inv, origin)


def _dequantize(target: Tensor, weight_OI: Tensor, scale_inv: Tensor, origin: Origin, is_transposed: bool) -> None:
    rows, columns = weight_OI.shape
    buffer = torch.empty((min(rows, BLOCK), columns), dtype=torch.bfloat16) if is_transposed else target
    for start, stop, scales_I in row_scales(Fp8Blocks(weight_OI, scale_inv, (origin[0] % BLOCK, origin[1] % BLOCK))):
        part, to = weight_OI[start:stop], buffer[: stop - start] if is_transposed else target[start:stop]
        _library().dequantize_rows(
            part.data_ptr(), part.stride(0), scales_I.data_ptr(), stop - start, columns, to.data_ptr(), to.stride(0)
        )
        if is_transposed:
            _transpose(target[start:stop], to)


def _transpose(target: Tensor, values: Tensor) -> None:
    rows, columns = values.shape
    _library().transpose16(values.data_ptr(), values.stride(0), rows, columns, target.data_ptr(), target.stride(1))


@cache
def _library() -> ctypes.CDLL:
    library = _load()
    library.dequantize_rows.argtypes, library.dequantize_rows.restype = [_P, _L, _P, _L, _L, _P, _L], None
    library.transpose16.argtypes, library.transpose16.restype = [_P, _L, _L, _L, _P, _L], None
    if hasattr(library, "crc32_blocks"):
        library.crc32_blocks.argtypes, library.crc32_blocks.restype = [_P, _L, ctypes.c_uint32], ctypes.c_uint32
    return library


def _load() -> ctypes.CDLL:
    build = NativeBuild(
        what="native kernels",
        compiler=compiler_of("CC", "cc"),
        flags=(*_FLAGS, *target_flags()),
        sources=(_SOURCE,),
        facts=tuple(sorted(instructions())),
        folder="mindspeed_llm",
        advice="set CC to gcc 12, clang or newer, or give --kernels torch",
        limit_s=_LIMIT_S,
    )
    try:
        return build.load()
    except RuntimeError as refused:
        raise ValueError(str(refused)) from refused
