"""jemalloc's statistics follow what a process allocates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from third_party.jemalloc import find_library, memory_stats

PROBE = """
import ctypes, json
from third_party.jemalloc import memory_stats
before = memory_stats()
held = ctypes.create_string_buffer(64 * 1024 * 1024)
print(json.dumps([before, memory_stats()]))
"""


def test_find_library_takes_the_first_folder_that_has_it(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert find_library([first, second]) is None
    (second / "libjemalloc.so.2").write_bytes(b"")
    assert find_library([first, second]) == second / "libjemalloc.so.2"


def test_statistics_are_none_under_another_allocator() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    assert _run_probe(environment) == [None, None]


def test_statistics_follow_an_allocation_when_preloaded() -> None:
    library = find_library()
    if library is None:
        pytest.skip("libjemalloc.so.2 is not on this machine (Debian: apt-get install libjemalloc2)")
    before, after = _run_probe({**os.environ, "LD_PRELOAD": str(library)})
    assert after["allocated"] - before["allocated"] >= 64 * 1024 * 1024
    assert after["allocated"] <= after["active"] <= after["mapped"]
    assert set(after) == {"allocated", "active", "resident", "mapped"}


def test_this_process_can_ask_at_any_time() -> None:
    stats = memory_stats()
    assert stats is None or stats["allocated"] > 0


def _run_probe(environment: dict[str, str]) -> list:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)
