"""The cores that this process may use, and a worker's share of them.

``os.cpu_count()`` is the machine's: it sees neither the affinity that taskset, Slurm and containers set, nor the time
that a container is limited to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

THREADS = "OMP_NUM_THREADS"
_PROC = Path("/proc/self")


def usable_cores(proc: Path = _PROC) -> int:
    """The number of cores in this process's affinity, or as many whole ones as its control groups give time for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([allowed, *_quotas(proc)])))


def threads_per_worker(num_workers: int, environment: Mapping[str, str] = os.environ) -> int:
    """Threads of each of ``num_workers`` processes that share this node; OMP_NUM_THREADS, where it is set, wins.

    ValueError: it is no positive number.
    """
    given = environment.get(THREADS, "").split(",")[0].strip()  # with commas, of nested levels: the first is torch's
    if not given:
        return max(1, usable_cores() // num_workers)
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"{THREADS}={environment[THREADS]!r}: expected a number of threads, at least 1, or unset")
    return int(given)


def _quotas(proc: Path) -> Iterator[float]:
    """Cores' worth of time that each control group around this process may use, where it has a limit."""
    paths: dict[str, str] = {}  # a controller's, or with an empty name that of version 2
    for line in _text(proc / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in _text(proc / "mountinfo").splitlines():
        fields, _, filesystem = line.partition(" - ")
        root, mount = fields.split()[3:5]
        kind, *_, options = filesystem.split()
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            path = paths.get("" if kind == "cgroup2" else "cpu", "/")
            inside = os.path.relpath(path, root)
            group = Path(mount) if inside.startswith("..") else Path(mount, inside)
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount) and (quota := _quota(folder)) is not None:
                    yield quota


def _quota(group: Path) -> float | None:
    """``cpu.max`` of version 2 ("max 100000": no limit), ``cpu.cfs_quota_us`` of version 1 (-1: no limit)."""
    words = _text(group / "cpu.max").split() or [
        *_text(group / "cpu.cfs_quota_us").split(),
        *_text(group / "cpu.cfs_period_us").split(),
    ]
    if len(words) != 2 or not words[0].isdecimal() or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux, no such controller, or not to be read: no limit is known
        return ""
