"""nvidia-smi: what it prints of the GPUs, read by the names of its ``--help-query-gpu``."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend.versions import numbers

DEVICES = Path("/dev")
TIMEOUT_S = 30
# What slows a GPU down beside its power limit and its load. Names since driver 535.
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
FIELDS = (
    "index", "name", "driver_version", "compute_cap", "memory.total", "memory.used", "persistence_mode",
    "mig.mode.current", "ecc.errors.uncorrected.volatile.total", "power.limit", "power.default_limit",
    *(f"clocks_event_reasons.{name}" for name in SLOWDOWNS),
)  # fmt: skip


class SmiError(Exception):
    """nvidia-smi did not answer as asked; the text says how."""


@dataclass(frozen=True)
class Gpu:
    """A row of ``nvidia-smi --query-gpu``; texts as printed, of which "[N/A]" is one."""

    values: dict[str, str]

    def __str__(self) -> str:
        return f"GPU {self.values['index']}"

    def number(self, field: str) -> float | None:
        """The number of a field; None where the GPU has none."""
        text = self.values[field]
        return float(text) if re.fullmatch(r"[\d.]+", text) else None

    @property
    def capability(self) -> tuple[int, ...]:
        return numbers(self.values["compute_cap"])


def is_present() -> bool:
    """Whether this machine shows a GPU or the driver's tool."""
    return any(DEVICES.glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def run(*arguments: str) -> str:
    """What nvidia-smi prints; SmiError when it is missing, hangs or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise SmiError("not found") from None
    except subprocess.TimeoutExpired:
        raise SmiError(f"hangs for {TIMEOUT_S} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise SmiError(f"exit code {done.returncode}{f': {said[0]}' if said else ''}")
    return done.stdout


def query_gpus() -> list[Gpu]:
    """Every GPU that the driver shows; SmiError where it shows none."""
    rows = list(table(run(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")))
    if not rows or any(len(row) != len(FIELDS) for row in rows):
        raise SmiError("lists no GPU")
    return [Gpu(dict(zip(FIELDS, row, strict=True))) for row in rows]


def table(text: str) -> Iterator[list[str]]:
    """The rows of a query with ``--format=csv,noheader``."""
    return ([cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row)
