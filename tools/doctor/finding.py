"""A finding of the doctor, the options of an examination, and the table of what is known to work (``tested.toml``)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("tested.toml")
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
    model_path: str | None = None


@dataclass(frozen=True)
class Stack:
    """Versions that go together; ``cann`` and ``driver`` are prefixes of version numbers.

    ``name`` is the value of STACK for tools/setup_env.sh, ``requirements`` the folder of the pins.
    """

    name: str
    requirements: str
    torch: str
    torch_npu: str
    cann: str
    driver: str


@dataclass(frozen=True)
class JobNeeds:
    """The needs of one config: devices and free memory of every node, free disk where the run writes.

    ``device`` is npu, cuda, or any for a config that runs without one.
    """

    config: str
    device: str = "any"
    num_devices: int = 0
    memory_gib: int = 8
    disk_gib: int = 10


def load_table(path: Path = TABLE) -> tuple[list[Stack], list[JobNeeds]]:
    """Both parts of the table."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    stacks, jobs = table["stack"].items(), table["job"].items()
    return [Stack(name, **row) for name, row in stacks], [JobNeeds(config, **row) for config, row in jobs]


def stack_of_torch(version: str | None) -> Stack:
    """The stack that has this torch; the first one when there is none."""
    stacks = load_table()[0]
    return next((stack for stack in stacks if version and version.split("+")[0] == stack.torch), stacks[0])


def needs_of_config(name: str) -> JobNeeds:
    """The row of a config; ValueError that names the known rows."""
    rows = {row.config: row for row in load_table()[1]}
    if name not in rows:
        raise ValueError(f"no needs are known for config {name!r}; known: {', '.join(rows)} ({TABLE.name})")
    return rows[name]
