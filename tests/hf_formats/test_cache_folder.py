"""Caches go where they can be written: a home that cannot be is the usual case in containers and batch systems."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from hf_formats.cache_folder import cache_folder, moved_caches


def test_the_users_own_cache_where_it_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder({}) == tmp_path / ".cache" and moved_caches({}) == {}
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path / "c")}) == tmp_path / "c"


@pytest.mark.parametrize("home", ["/proc/nobody", "~", "relative"])
def test_a_private_folder_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """/proc stands for a folder that nobody, root neither, can write to."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_folder({})
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
    moved = moved_caches({"MPLCONFIGDIR": "/mine"})
    assert moved["XDG_CACHE_HOME"] == str(folder) and moved["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert "MPLCONFIGDIR" not in moved, "a variable that is set keeps its value"
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="is not a folder that you alone can write to"):
        cache_folder({})
