"""Ray's session: sockets that fit whatever TMPDIR is, private, and removed when its process is gone, not before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from recipes.common import short_folder
from recipes.common.short_folder import SessionFolder, folder_problem

SOCKET = Path("session_2026-11-26_21-42-09_204942_1234567/sockets/plasma_store")


def use(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> Path:
    """Make ``temporary`` TMPDIR, which ``tempfile`` reads once."""
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    return temporary


@pytest.mark.parametrize("name", ["t", "x" * 150, "实验 b", "a'b\"c $x"])
def test_a_socket_of_ray_fits_and_its_files_are_in_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    temporary = tmp_path / name
    temporary.mkdir()
    use(monkeypatch, temporary)
    session = SessionFolder()
    path = session.path / SOCKET
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    (files,) = temporary.iterdir()
    assert (files / SOCKET).is_socket()
    for folder in {files, session.path.parent if session.path.is_symlink() else files}:
        assert folder.stat().st_mode & 0o777 == 0o700
    session.remove()
    assert list(temporary.iterdir()) == [] and not session.path.exists()


def test_a_session_lives_as_long_as_its_process_whatever_its_number_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers that share /tmp have the same process ids, and do not see each other's."""
    use(monkeypatch, tmp_path)
    program = (
        "import sys; from recipes.common.short_folder import SessionFolder; session = SessionFolder();"
        "print(session.path, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        theirs = Path(other.stdout.readline().strip())
        monkeypatch.setattr(os, "getpid", lambda: 7)
        mine = SessionFolder()
        assert theirs.is_dir(), "it belongs to a process that lives"
        other.kill()
        other.wait(60)
    again = SessionFolder()
    assert not theirs.exists() and mine.path.is_dir()
    mine.remove()
    again.remove()


def test_without_a_short_folder_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 150)
    long.mkdir()
    use(monkeypatch, long)
    assert folder_problem() is None
    monkeypatch.setattr(short_folder, "_is_safe", lambda folder: folder == long)  # only the long one can be written
    assert "Unix sockets need a folder whose path has at most" in (folder_problem() or "")
    with pytest.raises(ValueError, match="set TMPDIR, or XDG_RUNTIME_DIR"):
        SessionFolder()
    use(monkeypatch, tmp_path / "absent")
    assert "absent'; expected a folder that you can write to" in (folder_problem() or "")


def test_a_folder_that_others_can_change_is_not_safe(tmp_path: Path) -> None:
    assert short_folder._is_safe(tmp_path)
    tmp_path.chmod(0o777)
    assert not short_folder._is_safe(tmp_path)
    tmp_path.chmod(0o1777)
    assert short_folder._is_safe(tmp_path)


def test_processes_start_whatever_tmpdir_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert short_folder.start_method() == "forkserver"
    long = tmp_path / ("x" * 150)
    long.mkdir()
    program = (
        "import multiprocessing as m; from recipes.common.short_folder import start_method;"
        "process = m.get_context(start_method()).Process(target=print, args=('started',));"
        "process.start(); process.join(); raise SystemExit(process.exitcode)"
    )
    use(monkeypatch, long)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "started"
