"""The memory allocator of all engines: jemalloc where it is installed.

A training step allocates and frees gigabytes; without it, a fifth of the time of every engine goes to page faults.
"""

from __future__ import annotations

from collections.abc import Mapping

from third_party.jemalloc import find_library


def allocator_name() -> str:
    """The allocator's name for reports."""
    return "the system's" if find_library() is None else "jemalloc"


def allocator_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables, beside the inherited ones, with which a process uses the allocator, with huge pages."""
    library = find_library()
    if library is None:
        return {}
    return {
        "LD_PRELOAD": ":".join(filter(None, [str(library), inherited.get("LD_PRELOAD", "")])),
        "MALLOC_CONF": "thp:always,dirty_decay_ms:-1",
    }
