"""A finding of the doctor, and the options of an examination."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024**3


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``remedy`` is empty when all is well; a run does not start with a fatal problem."""

    name: str
    value: str
    remedy: str = ""
    is_fatal: bool = False

    @property
    def mark(self) -> str:
        if not self.remedy:
            return "[green]ok[/green]"
        return "[red]problem[/red]" if self.is_fatal else "[yellow]note[/yellow]"


@dataclass(frozen=True)
class Options:
    """The run that the machine is examined for; ``config_name`` is a row of ``tested.toml``."""

    output_dir: Path
    ports: tuple[int, ...]
    master_addr: str | None
    socket_ifname: str | None
    config_name: str = "r1_zero_tiny"
