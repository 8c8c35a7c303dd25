"""Logs of a run: a folder per attempt, and Ray's files under the names of ranks, also after a killed launcher."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_formats.files import write_text
from tools.launch import output_dir


def _session(folder: Path) -> Path:
    """What Ray leaves: files of workers, the first lines of which say who wrote them, and others."""
    logs = folder / "session_1" / "logs"
    logs.mkdir(parents=True)
    (folder / "session_latest").symlink_to(folder / "session_1")
    for name, head in (("a-1", "rank 0"), ("b-2", "rank 10"), ("c-3", "ScoringWorker")):
        for suffix in ("out", "err"):
            text = f":job_id:01\n:actor_name:WorkerProcess\n:actor_name:{head}\nsaid to {suffix}\n"
            (logs / f"worker-{name}.{suffix}").write_text(text)
    (logs / "worker-idle-4.out").write_text("")
    (logs / "raylet.out").write_text("raylet")
    return folder / "session_latest" / "logs"


def test_every_attempt_has_a_folder_and_latest_leads_to_the_newest(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for number in (1, 2, 3):
        assert output_dir.new_attempt(logs) == logs / f"attempt_{number}"
        assert os.readlink(logs / "latest") == f"attempt_{number}"
    (logs / "attempt_old").mkdir()
    (logs / "attempt_2").rmdir()
    assert output_dir.new_attempt(logs).name == "attempt_4"


def test_another_node_finds_the_attempt_of_the_head(tmp_path: Path) -> None:
    """On a shared disk that is the head's newest; a node with a disk of its own has a folder for each attempt too."""
    shared, own = tmp_path / "logs", tmp_path / "own_disk"
    for number in (1, 2):
        attempt = output_dir.new_attempt(shared)
        assert output_dir.attempt_of_worker(shared, "10.0.0.2") == attempt
        output_dir.start_log(attempt, "10.0.0.2").touch()
        mine = output_dir.attempt_of_worker(own, "10.0.0.2")
        assert mine == own / f"attempt_{number}"
        output_dir.start_log(mine, "10.0.0.2").touch()


def test_ray_files_are_there_while_it_runs_and_after(tmp_path: Path) -> None:
    attempt = output_dir.new_attempt(tmp_path / "logs")
    kept = attempt / "ray_10.0.0.1"
    output_dir.show_session(tmp_path / "ray" / "session_latest" / "logs", kept)
    assert not kept.exists(), "Ray has not started"
    _session(tmp_path / "ray")
    assert (kept / "raylet.out").read_text() == "raylet"
    output_dir.keep_session(kept)
    assert not kept.is_symlink() and (kept / "raylet.out").read_text() == "raylet"
    names = ["rank_0.err", "rank_0.out", "rank_10.err", "rank_10.out"]
    assert sorted(path.name for path in attempt.glob("rank_*")) == names
    assert (attempt / "rank_10.out").read_text().endswith("said to out\n")
    assert os.readlink(attempt / "rank_10.out") == "ray_10.0.0.1/worker-b-2.out", "the folder may be moved"
    output_dir.keep_session(kept)  # nothing is left to do


def test_a_rank_that_was_started_again_shows_its_last_process(tmp_path: Path) -> None:
    kept = output_dir.new_attempt(tmp_path / "logs") / "ray_10.0.0.1"
    logs = _session(tmp_path / "ray")
    (logs / "worker-0-9.out").write_text(":actor_name:rank 0\nthe second\n")
    os.utime(logs / "worker-a-1.out", (time.time() - 100,) * 2)
    output_dir.show_session(logs, kept)
    output_dir.keep_session(kept)
    assert (kept.parent / "rank_0.out").read_text().endswith("the second\n")


def test_the_next_attempt_keeps_what_a_killed_launcher_left(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for address, folder in (("10.0.0.1", "mine"), ("10.0.0.2", "other_node")):
        output_dir.show_session(_session(tmp_path / folder), logs / "attempt_1" / f"ray_{address}")
    output_dir.show_session(tmp_path / "gone" / "logs", logs / "attempt_2" / "ray_10.0.0.1")
    output_dir.keep_earlier_sessions(logs, "10.0.0.1")
    assert not (logs / "attempt_1" / "ray_10.0.0.1").is_symlink() and (logs / "attempt_1" / "rank_0.out").is_file()
    assert (logs / "attempt_1" / "ray_10.0.0.2").is_symlink(), "that is the other node's to keep"
    assert not os.path.lexists(logs / "attempt_2" / "ray_10.0.0.1")


def test_a_file_never_replaces_a_folder_or_a_device(tmp_path: Path) -> None:
    """``--output /dev/stdout`` of a command must not make a file of the device."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    for name in ("folder", "device"):
        with pytest.raises(OSError, match="no file can be written there"):
            write_text(tmp_path / name, "text")
    assert Path("/dev/null").is_char_device() and (tmp_path / "device").is_symlink()


def test_every_node_gets_one_token_on_a_disk_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    with ThreadPoolExecutor(8) as pool:
        (token,) = set(pool.map(lambda _: output_dir.shared_token(tmp_path / "out", None), range(8)))
    assert len(token) == 64 and stat.S_IMODE((tmp_path / "out" / ".ray_auth_token").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".ray_auth_token"]
    (tmp_path / "out" / ".ray_auth_token").write_text(token[:9])
    monkeypatch.setattr(output_dir, "TOKEN_WAIT_S", 0.1)
    with pytest.raises(ValueError, match="holds no whole token: remove it"):
        output_dir.shared_token(tmp_path / "out", None)


def test_a_disk_without_locks_is_said_once_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with output_dir.only_run(tmp_path):
        assert "its file system has no locks" in caplog.text
