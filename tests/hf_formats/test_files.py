"""Removal of what is not needed any more: it removes what it can, warns, and never raises."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path

import pytest

from hf_formats.files import try_remove, write_bytes


def exit_status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_files_folders_and_links_are_removed_and_absent_ones_are_no_matter(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    (folder / "inside").mkdir(parents=True)
    write_bytes(folder / "inside" / "file", b"1")
    link.symlink_to(folder)
    assert try_remove(link) and folder.is_dir()
    assert try_remove(folder / "inside" / "file") and try_remove(folder) and try_remove(folder)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_somebody_uses_is_left_with_a_warning_and_all_else_of_it_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Network file systems put a .nfs file where an open one was removed."""
    for name in ("a", "used", "z"):
        (tmp_path / "old" / name).mkdir(parents=True)
        (tmp_path / "old" / name / "weights").write_text("1")

    def reappear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rmdir" and Path(str(arguments[0])).name == "used":
            (tmp_path / "old" / "used" / ".nfs1").touch()

    child = os.fork()
    if child == 0:  # an audit hook cannot be taken away again
        try:
            sys.addaudithook(reappear)
            with caplog.at_level(logging.WARNING):
                assert not try_remove(tmp_path / "old")
            assert "used/.nfs1 stays" in caplog.text
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert exit_status(child) == 0
    assert [path.name for path in (tmp_path / "old").rglob("*")] == ["used", ".nfs1"]
    assert try_remove(tmp_path / "old")
