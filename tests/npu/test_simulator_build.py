"""The libraries are built once per state of the sources, whoever asks, and a failed build leaves nothing."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from npusim import build


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without builds."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def test_many_at_once_build_once(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def slow_build(out: Path) -> None:
        built.append(out)
        time.sleep(0.2)
        (out / "libascendcl.so").touch()

    monkeypatch.setattr(build, "build_into", slow_build)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: build.library_dir(), range(4)))
    assert len(built) == 1 and len(found) == 1
    assert [path.name for path in found.pop().iterdir()] == ["libascendcl.so"]


def test_a_changed_source_is_another_build(prefix: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "build_into", lambda out: None)
    first = build.library_dir()
    sources = tmp_path / "sources"
    (sources / "cann").mkdir(parents=True)
    (sources / "cann/runtime.cpp").write_text("// another\n")
    monkeypatch.setattr(build, "HERE", sources)
    assert build.library_dir() != first


def test_a_failed_build_says_why_and_leaves_nothing(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_into", lambda out: build.run("g++", "-c", "/no/such/file.cpp"))
    with pytest.raises(build.BuildError, match=r"g\+\+ failed"):
        build.library_dir()
    assert [path.name for path in (prefix / "npusim").iterdir()] == ["lock"]
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(build.BuildError, match="no g"):
        build.library_dir()
