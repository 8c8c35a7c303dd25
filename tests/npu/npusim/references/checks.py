"""What a kernel refuses: references raise as the real one would, so that a call outside its limits cannot pass."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from npusim.build import library_dir

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class KernelRefused(RuntimeError):
    """A call that the documentation of the real kernel excludes, or that its reference does not simulate."""


@functools.cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_dir() / "libascendcl.so"))


def cann_version() -> tuple[int, ...]:
    """The leading numbers of the simulated CANN's version (``FAKE_NPU_CANN``): (8, 3)."""
    text = ctypes.create_string_buffer(64)
    _runtime().aclsysGetVersionStr(b"runtime", text)
    return tuple(int(part) for part in text.value.decode().split(".") if part.isdigit())


def require(is_supported: bool, op: str, limit: str) -> None:
    """Raises ``KernelRefused`` with the op's name and the limit that the call is outside of."""
    if not is_supported:
        raise KernelRefused(f"{op}: {limit}")


def require_floats(op: str, *tensors: Tensor | None) -> None:
    """float16, bfloat16 or float32, and one dtype for all."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    require(len(dtypes) == 1 and dtypes <= set(FLOATS), op, f"wants one of {FLOATS} for all tensors, got {dtypes}")


def unwritten(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An output that the kernel need not write: NaN, so that who reads it notices."""
    return torch.full(shape, float("nan"), dtype=dtype or like.dtype)
