"""Reads jemalloc's statistics through its ``mallctl`` interface, when jemalloc is the allocator of this process.

A rollout worker's host memory grows by fragmentation more than by use; ``resident`` against ``allocated`` tells which.
jemalloc must be in the process from its start, so it is preloaded: ``LD_PRELOAD=$(python -m third_party.jemalloc)``.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

# The second version of the library is the one whose statistics names are used here.
LIBRARY_NAME = "libjemalloc.so.2"


class MemoryStats(TypedDict):
    """Bytes, as jemalloc's manual defines them under ``stats.*``."""

    allocated: int  # handed out to the application
    active: int  # in pages that hold at least one allocation
    resident: int  # physically backed, with the allocator's own structures and unused dirty pages
    mapped: int  # in chunks mapped by the allocator


def library_folders() -> list[Path]:
    """Where distributions put the library: Debian's multi-arch folders, then Red Hat's, then a local build's."""
    machine = platform.machine()
    return [
        Path(p)
        for p in (f"/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib64", "/usr/local/lib")
    ]


def find_library(folders: Iterable[Path] | None = None) -> Path | None:
    """The library file to preload, or None when the machine has none."""
    for folder in folders if folders is not None else library_folders():
        path = folder / LIBRARY_NAME
        if path.is_file():
            return path
    return None


def _mallctl() -> ctypes._NamedFuncPointer | None:
    """``mallctl`` of the jemalloc that serves this process's malloc; None under another allocator."""
    try:
        function = ctypes.CDLL(None).mallctl  # the global namespace: only what was loaded at start is in it
    except AttributeError:
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_int
    return function


def is_loaded() -> bool:
    """Whether jemalloc serves this process."""
    return _mallctl() is not None


def memory_stats() -> MemoryStats | None:
    """Current statistics; None when this process runs under another allocator, or jemalloc was built without them."""
    mallctl = _mallctl()
    if mallctl is None:
        return None
    # Statistics are a snapshot: writing the epoch takes a new one.
    epoch = ctypes.c_uint64(1)
    if mallctl(b"epoch", None, None, ctypes.byref(epoch), ctypes.sizeof(epoch)) != 0:
        return None
    values: dict[str, int] = {}
    for name in ("allocated", "active", "resident", "mapped"):
        value, size = ctypes.c_size_t(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_size_t))
        if mallctl(f"stats.{name}".encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
            return None
        values[name] = value.value
    return MemoryStats(
        allocated=values["allocated"], active=values["active"], resident=values["resident"], mapped=values["mapped"]
    )
