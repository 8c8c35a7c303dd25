"""A rebase that is killed at any moment leaves the tree as it was, or, once it moves, complete."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.tools.subtree_repos import ROOT, commit, git, repository, state, tool, upstream, write
from tools.subtree import move
from tools.subtree.git import Git

DEADLY: dict[str, tuple[object, str]] = {
    "git": (Git, "run"),
    "replace": (os, "replace"),
    "unlink": (Path, "unlink"),
    "rmtree": (shutil, "rmtree"),
}


def killed_at(function: str, count: int, work: Callable[[], None]) -> bool:
    """Do ``work`` in a child process that gets SIGKILL at call number ``count`` of a function; False when it ended."""
    child = os.fork()
    if child == 0:
        owner, name = DEADLY[function]
        plain, calls = getattr(owner, name), itertools.count(1)

        def deadly(*args: object, **kwargs: object) -> object:
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        setattr(owner, name, deadly)
        try:
            work()
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An upstream, and a small fork of it with a change of its own."""
    base = tmp_path_factory.mktemp("repos")
    up = upstream(base / "up", inside="")
    root = repository(base / "ours")
    write(root / "README.md", "ours\n")
    commit(root, "start")
    tool(root, "import", "pkg", "--files", "--tag", "v1", "--upstream", str(up), "--licence", "MIT")
    write(
        root / "pkg/changed_by_us.py", "def stays():\n    return 1000\n\n\ndef goes(a):\n    b = a + 1\n    return b\n"
    )
    commit(root, "ours")
    return base


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "r")
    git(tmp_path / "r/ours", "update-index", "-q", "--refresh")
    return tmp_path / "r/ours"


def words(root: Path, tag: str) -> tuple[str, ...]:
    return ("rebase", "pkg", "--tag", tag, "--upstream", str(root.parent / "up"))


@pytest.mark.parametrize("every", [25, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_while_it_prepares_nothing_has_changed(root: Path, every: int) -> None:
    before = state(root)
    count, kills = 1, 0
    while killed_at("git", count, lambda: print(tool(root, *words(root, "v1.3")))):
        assert state(root) == before, count
        count, kills = count + every, kills + 1
    assert kills >= 25 // every
    assert not (root / ".git/subtree-stage").exists() and os.listdir(root / ".git/subtree-scratch") == []
    assert git(root, "log", "-1", "--format=%s") == "Rebase pkg onto v1.3" and git(root, "status", "--porcelain") == ""


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tag", ["v1.3", "v1.5"])  # one is committed, one ends in conflicts
def test_killed_while_it_moves_the_next_command_undoes_it(
    root: Path, tag: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    git_here, prepared = Git(root), []
    monkeypatch.setattr(move, "start", lambda git, folder, plan: prepared.append(write_plan(folder, plan)))
    before = state(root)
    tool(root, *words(root, tag), code=0 if tag == "v1.3" else 3)
    stage = git_here.git_path(move.STAGE)
    keep = root.parent / "prepared"
    shutil.copytree(stage, keep, symlinks=True)
    assert prepared and state(root) == before
    outcomes = set()
    for function in ("unlink", "replace", "git", "rmtree"):
        count = 1
        while killed_at(function, count, lambda: move.carry_out(git_here)):
            said = move.recover(git_here)
            now = state(root)
            assert not (stage / move.PLAN).exists() and not (root / ".git/index.lock").exists()
            shutil.rmtree(stage, ignore_errors=True)  # as the next rebase does
            if now == before:
                assert "undone" in said[0]
                outcomes.add("undone")
                assert tool(root, "list")
            else:
                outcomes.add("complete")
                assert_complete(root, tag)
                take_back(root, before)
            count += every
            shutil.copytree(keep, stage, symlinks=True)
        assert_complete(root, tag)
        take_back(root, before)
        shutil.copytree(keep, stage, symlinks=True)
    assert outcomes == {"undone", "complete"}


def write_plan(folder: Path, plan: move.Plan) -> Path:
    move.write_plan(folder, plan)
    return folder


def assert_complete(root: Path, tag: str) -> None:
    if tag == "v1.3":
        assert git(root, "log", "-1", "--format=%s") == "Rebase pkg onto v1.3"
        assert git(root, "status", "--porcelain") == ""
    else:
        assert (root / ".git/MERGE_HEAD").exists() and "UU pkg/changed_by_us.py" in git(root, "status", "--porcelain")
    assert (root / "pkg/brand_new.py").exists() and not (root / "pkg/old_name.py").exists()


def take_back(root: Path, before: tuple[str, str, dict[str, str]]) -> None:
    git(root, "reset", "--quiet", "--hard", before[0])
    assert state(root) == before


def test_an_edit_made_after_the_interruption_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "start", lambda git, folder, plan: move.write_plan(folder, plan))
    tool(root, *words(root, "v1.3"))
    assert killed_at("replace", 3, lambda: move.carry_out(Git(root)))
    edited = next(p for p in ("pkg/brand_new.py", "pkg/clean.py") if git(root, "status", "--porcelain", p))
    write(root / edited, "edited by hand\n")
    assert f"{edited} was edited since" in tool(root, "list")
    assert (root / edited).read_text(encoding="utf-8") == "edited by hand\n"


def test_killing_the_command_and_its_group_does_not_stop_the_move(root: Path) -> None:
    command = [sys.executable, "-m", "tools.subtree", "--root", str(root), *words(root, "v1.3")]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    while process.poll() is None and not has_mover(process.pid):
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    plan, deadline = root / ".git" / move.STAGE / move.PLAN, time.monotonic() + 20
    while plan.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert_complete(root, "v1.3")


def has_mover(pid: int) -> bool:
    """Whether a process has started the one that moves the files (Linux)."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return any(b"tools.subtree.move" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)
    return False


def test_two_at_once_are_refused(root: Path) -> None:
    with move.stage(Git(root)):
        assert "another tools.subtree command" in tool(root, *words(root, "v1.3"), code=1)
    assert "Done" in tool(root, *words(root, "v1.3"))


def test_a_git_command_at_work_stops_the_move_and_nothing_changes(root: Path) -> None:
    before = state(root)
    os.utime(root / "README.md", (0, 0))  # git would have something to write down
    (root / ".git/index.lock").write_bytes(b"")
    shown = tool(root, *words(root, "v1.3"), code=1)
    (root / ".git/index.lock").unlink()
    assert "index.lock" in shown and state(root) == before
