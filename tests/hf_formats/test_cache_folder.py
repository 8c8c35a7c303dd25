"""Caches go where they can be written: a home that cannot be is the usual case in containers and batch systems."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hf_formats.cache_folder import cache_folder, moved_caches

ROOT = Path(__file__).resolve().parents[2]


def test_the_users_own_cache_where_it_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder({}) == tmp_path / ".cache" and moved_caches({}) == {}
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path / "c")}) == tmp_path / "c"


def test_a_home_from_which_no_library_can_be_loaded(tmp_path: Path) -> None:
    """Mounted ``noexec``, as hardened machines do it with /home."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir(), temporary.mkdir()
    mounted = 'mount -t tmpfs -o noexec none "$1" && exec "$2" -c "$3"'
    code = "from hf_formats.cache_folder import cache_folder; print(cache_folder())"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", str(home), sys.executable, code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode and re.match("unshare:|mount:", done.stderr):
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert Path(done.stdout.strip()).parent == temporary, done.stderr


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
