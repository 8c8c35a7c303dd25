"""Memory of one rank in each phase of a step: the most of its device, and its host's at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

GIB = 2**30


class PhaseMemory:
    """Figures of the last phase of each name; outside of phases nothing is measured.

    Args:
        accelerator: ``torch.cuda`` or ``torch.npu``, whose peak is reset as a phase begins; None on the CPU.
    """

    def __init__(self, accelerator: ModuleType | None) -> None:
        self._accelerator = accelerator
        self._figures: dict[str, dict[str, float]] = {}
        self._open: str | None = None
        self._most = {"allocated": 0, "reserved": 0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is inside; a phase within another is part of it."""
        if self._open is not None:
            yield
            return
        self._open = name
        if self._accelerator is not None:
            self._note_peak()
            self._accelerator.reset_peak_memory_stats()
        try:
            yield
            self._figures[name] = self._read()
        finally:
            self._open = None

    def most_bytes(self) -> dict[str, int]:
        """The most ``allocated`` and ``reserved`` bytes of the device since the process started."""
        self._note_peak()
        return dict(self._most)

    def take_metrics(self) -> dict[str, float]:
        """``memory/{phase}/{allocated,reserved,host}_gb`` since the last call, with the phase that is still open."""
        figures, self._figures = self._figures, {}
        if self._open is not None:
            figures[self._open] = self._read()
        return {f"memory/{name}/{kind}_gb": value for name, found in figures.items() for kind, value in found.items()}

    def _read(self) -> dict[str, float]:
        host = {"host": resident_bytes() / GIB}
        if self._accelerator is None:
            return host
        peak = self._peak()
        return {kind: peak[kind] / GIB for kind in peak} | host

    def _note_peak(self) -> None:
        if self._accelerator is not None:
            self._most = {kind: max(self._most[kind], value) for kind, value in self._peak().items()}

    def _peak(self) -> dict[str, int]:
        assert self._accelerator is not None
        return {
            "allocated": int(self._accelerator.max_memory_allocated()),
            "reserved": int(self._accelerator.max_memory_reserved()),
        }


def resident_bytes() -> int:
    """Host memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
