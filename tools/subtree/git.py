"""Every git call of the subtree tool: argument lists only, no shell."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REDIRECTS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX")
PLAIN = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}


class GitError(ValueError):
    """A git command that failed: its arguments, and git's message."""


def git(folder: Path, *words: str, ok: tuple[int, ...] = (0,), limit_s: float = 900.0, **variables: str) -> str:
    """The output of one command in ``folder``; GitError: an exit code not among ``ok``, no git, or no end in time."""
    env = {name: value for name, value in os.environ.items() if name not in REDIRECTS} | PLAIN | variables
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, env=env, timeout=limit_s)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise GitError(f"cannot run git in {folder}: {error}") from error
    if done.returncode not in ok:
        message = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise GitError(f"`git {' '.join(words[:6])}` failed in {folder}: {message}")
    return done.stdout.decode(errors="surrogateescape").strip()


def commit_of(folder: Path, name: str) -> str:
    """The full id of the commit called ``name`` (a tag, branch or id) in a repository; "" when there is none."""
    return git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", ok=(0, 1, 128))


def moves(old: Path, new: Path) -> tuple[dict[str, str], list[str], set[str]]:
    """Renamed (old -> new), added and deleted paths between two folders, by git's idea of a renamed file."""
    shown = git(old, "diff", "--no-index", "--name-status", "-M", "-z", str(old), str(new), ok=(0, 1))
    fields = iter(shown.split("\0"))
    renamed: dict[str, str] = {}
    added: list[str] = []
    deleted: set[str] = set()
    for status in filter(None, fields):
        path = next(fields)
        if status[0] == "R":
            renamed[path.removeprefix(f"{old}/")] = next(fields).removeprefix(f"{new}/")
        elif status[0] == "A":
            added.append(path.removeprefix(f"{new}/"))
        elif status[0] == "D":
            deleted.add(path.removeprefix(f"{old}/"))
    return renamed, added, deleted
