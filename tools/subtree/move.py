"""Moves a prepared change into the working tree, all of it or nothing, also when the process is killed half-way.

Everything is prepared below ``.git/subtree-stage``: the new files, the new index and the old one. The
move renames them into place and ends with its commit point: the branch moves, or ``MERGE_HEAD`` appears. It runs in a
process of its own session, so that killing the command does not stop it in the middle. When even that process dies
before its commit point, the next command puts every file back (``recover``).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_formats.files import write_text
from tools.subtree.git import SCRATCH, Git
from tools.subtree.manifest import ROOT

STAGE = "subtree-stage"
PLAN = "plan.json"
MERGE_FILES = ("MERGE_MSG", "MERGE_MODE", "MERGE_HEAD")  # the last one makes it a merge for git


@dataclass(frozen=True)
class Plan:
    """What the move does. ``new`` and ``old`` hold the ids of the blobs before and after, by path."""

    head: str  # the commit before
    commit: str | None  # the commit after; None leaves a merge in progress with ``merge_head``
    merge_head: str
    new: dict[str, str]  # files to write: changed and added
    old: dict[str, str]  # files that are there now: changed and removed
    message: str  # for the reflog

    @property
    def removed(self) -> list[str]:
        return [path for path in self.old if path not in self.new]


@contextmanager
def stage(git: Git) -> Iterator[Path]:
    """An empty folder to prepare a move in, for one process at a time; an interrupted move is undone first."""
    with _locked(git):
        _recover(git)
        shutil.rmtree(git.git_path(SCRATCH), ignore_errors=True)
        folder = git.git_path(STAGE)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            if not (folder / PLAN).exists():
                shutil.rmtree(folder, ignore_errors=True)


def recover(git: Git) -> list[str]:
    """Undo a move that was killed half-way; returns what was done, for people. ValueError when one is under way."""
    if not (git.git_path(STAGE) / PLAN).exists():
        return []
    with _locked(git):
        return _recover(git)


def start(git: Git, folder: Path, plan: Plan) -> None:
    """Carry out ``plan``, whose files are prepared in ``folder``; ValueError (and nothing changed) when it cannot."""
    write_plan(folder, plan)
    mover = subprocess.Popen(
        [sys.executable, "-m", "tools.subtree.move", str(git.folder)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=_held,  # the lock stays taken for as long as the mover lives
    )
    _, errors = mover.communicate()
    if mover.returncode:
        undone = _recover(git)
        raise ValueError("\n".join([f"the prepared change could not be moved in: {errors.strip()}", *undone]))


def write_plan(folder: Path, plan: Plan) -> None:
    """From here on the move is carried out, or undone by the next command."""
    write_text(folder / PLAN, json.dumps(asdict(plan)))


def carry_out(git: Git) -> None:
    """The move itself."""
    folder = git.git_path(STAGE)
    plan = Plan(**json.loads((folder / PLAN).read_text(encoding="utf-8")))
    index = git.git_path("index")
    os.link(folder / "index.new", index.with_name("index.lock"))  # git's own lock, with its content from the start
    for path in plan.removed:
        (git.folder / path).unlink(missing_ok=True)
        _prune(git.folder, path)
    for path in plan.new:
        target = git.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / "new" / path, target)
    os.replace(index.with_name("index.lock"), index)
    if plan.commit:
        git.run("update-ref", "-m", plan.message, "HEAD", plan.commit, plan.head)
    else:
        for name in MERGE_FILES:
            os.replace(folder / name, git.git_path(name))
    _finish(folder)
    _refresh(git)


def _refresh(git: Git) -> None:
    """Let the index know the files' times, which only saves git work later: no matter when its lock is taken (128)."""
    git.run("update-index", "-q", "--refresh", ok=(0, 1, 128))


def _recover(git: Git) -> list[str]:
    folder = git.git_path(STAGE)
    if not (folder / PLAN).exists():
        shutil.rmtree(folder, ignore_errors=True)  # killed while it was preparing: nothing was touched
        return []
    plan = Plan(**json.loads((folder / PLAN).read_text(encoding="utf-8")))
    if _is_done(git, plan):
        _finish(folder)
        return ["an earlier move was complete, its leftovers are gone"]
    edited = _restore_files(git, folder, plan)
    index = git.git_path("index")
    lock = index.with_name("index.lock")
    if _same_file(lock, folder / "index.new"):
        lock.unlink()
    if _same_index(git, index, folder / "index.new"):
        os.replace(folder / "index.old", index)
    for name in MERGE_FILES:
        if not (folder / name).exists() and not plan.commit:
            git.git_path(name).unlink(missing_ok=True)
    _finish(folder)
    _refresh(git)
    done = ["a move that was interrupted half-way was undone: the tree is as it was before"]
    return done + [f"  {path} was edited since and was left as it is" for path in edited]


def _restore_files(git: Git, folder: Path, plan: Plan) -> list[str]:
    """Put the old files back; returns the paths whose content is neither the old nor the new one."""
    edited, missing = [], []
    for path in {**plan.new, **plan.old}:
        target = git.folder / path
        if path not in plan.old and os.path.lexists(folder / "new" / path):
            continue  # not moved yet
        found = _blob_of(git, target, path) if os.path.lexists(target) else None
        if found not in (None, plan.new.get(path), plan.old.get(path)):
            edited.append(path)
            continue
        if found is not None and found == plan.new.get(path):
            target.unlink()
            _prune(git.folder, path)
            found = None
        if found is None and path in plan.old:
            missing.append(path)
    Git(git.folder, folder / "index.old").checkout(missing, git.folder.resolve())
    return edited


def _is_done(git: Git, plan: Plan) -> bool:
    if plan.commit:
        return git.commit("HEAD") == plan.commit
    merge_head = git.git_path("MERGE_HEAD")
    return merge_head.exists() and merge_head.read_text(encoding="utf-8").strip() == plan.merge_head


def _finish(folder: Path) -> None:
    (folder / PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _blob_of(git: Git, file: Path, path: str) -> str:
    """The id of a file's content; "" for a folder."""
    if file.is_symlink():
        return git.text("hash-object", "--stdin", stdin=os.readlink(file).encode())
    return "" if file.is_dir() else git.text("hash-object", f"--path={path}", str(file))


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _same_index(git: Git, one: Path, other: Path) -> bool:
    """Whether two index files list the same; git rewrites one whenever it looks at the tree."""
    listings = [Git(git.folder, index).run("ls-files", "--stage", "-z").stdout for index in (one, other)]
    return listings[0] == listings[1]


def _prune(root: Path, path: str) -> None:
    """Remove the folders that became empty; files that git does not know keep theirs."""
    for parent in list(Path(path).parents)[:-1]:
        with suppress(OSError):
            (root / parent).rmdir()


_held: list[int] = []


@contextmanager
def _locked(git: Git) -> Iterator[None]:
    path = git.git_path(STAGE).with_name(STAGE + ".lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ValueError(f"another tools.subtree command is changing {git.folder}: wait for it to end") from error
    _held.append(descriptor)
    try:
        yield
    finally:
        _held.remove(descriptor)
        os.close(descriptor)


if __name__ == "__main__":
    try:
        carry_out(Git(Path(sys.argv[1])))
    except (OSError, ValueError) as failure:
        sys.exit(f"{type(failure).__name__}: {failure}")
