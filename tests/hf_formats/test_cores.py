"""Cores that a process may use: its affinity and the quota of its control groups; a worker's share of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_formats.cores import threads_per_worker, usable_cores

MACHINE = 12


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MACHINE)))


def write_groups(root: Path, groups: str, mounts: list[str], files: dict[str, str]) -> Path:
    """A /proc/self beside control groups; ``{}`` in mounts is where these are."""
    for name, text in {"proc/cgroup": groups, "proc/mountinfo": "\n".join(mounts).replace("{}", str(root))}.items():
        files = {**files, name: text}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc"


V2 = ["29 23 0:26 / {}/v2 rw,nosuid shared:4 - cgroup2 cgroup rw,nsdelegate"]
V1 = [
    "31 30 0:28 / {}/v1/memory rw - cgroup cgroup rw,memory",
    "32 30 0:29 /docker/a1 {}/v1/cpu rw - cgroup cgroup rw,cpu,cpuacct",
    "33 30 0:30 / {}/v1/unified rw - cgroup2 cgroup2 rw",
]


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cores"),
    [
        ("", [], {}, MACHINE),
        ("0::/\n", V2, {"v2/cpu.max": "max 100000\n"}, MACHINE),
        ("0::/\n", V2, {"v2/cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", V2, {"v2/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", V2, {"v2/cpu.max": "6400000 100000\n"}, MACHINE),
        ("0::/a/b\n", V2, {"v2/a/cpu.max": "300000 100000\n", "v2/a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/../other\n", V2, {"v2/cpu.max": "400000 100000\n"}, 4),
        (
            "9:cpuset:/x\n4:cpu,cpuacct:/docker/a1/job\n0::/\n",
            V1,
            {
                "v1/cpu/job/cpu.cfs_quota_us": "200000\n",
                "v1/cpu/job/cpu.cfs_period_us": "100000\n",
                "v1/cpu/cpu.cfs_quota_us": "-1\n",
                "v1/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
    ],
)
def test_affinity_and_quota_bound_the_cores(
    groups: str, mounts: list[str], files: dict[str, str], cores: int, tmp_path: Path
) -> None:
    assert usable_cores(write_groups(tmp_path, groups, mounts, files)) == cores


def test_workers_share_the_cores_unless_the_user_says_otherwise() -> None:
    cores = usable_cores()  # of this machine, whose control groups may have limits of their own
    assert [threads_per_worker(workers, {}) for workers in (1, 2, 100)] == [cores, max(1, cores // 2), 1]
    assert threads_per_worker(1, {"OMP_NUM_THREADS": "3"}) == threads_per_worker(1, {"OMP_NUM_THREADS": "3,2"}) == 3
    for wrong in ("two", "0", "-1"):
        with pytest.raises(ValueError, match=rf"OMP_NUM_THREADS='{wrong}': expected a number"):
            threads_per_worker(1, {"OMP_NUM_THREADS": wrong})
