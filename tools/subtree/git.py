"""Every git call of the subtree tool: one repository, argument lists only, no shell."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

REDIRECTS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_PREFIX")
SCRATCH = "subtree-scratch"
MERGE_TREE = (2, 38)  # the first git whose `merge-tree --write-tree` merges without a working tree


class GitError(ValueError):
    """A git command that failed: its arguments, and git's message."""


class TreeEntry(NamedTuple):
    """One file of a tree object."""

    mode: str  # "100644", "100755", "120000" (a link), "160000" (a submodule)
    oid: str


class Git:
    """The repository at ``folder``; with ``index`` its commands use that index file instead of the repository's."""

    def __init__(self, folder: Path, index: Path | None = None) -> None:
        self.folder = folder
        self.index = index

    def run(
        self, *words: str, stdin: bytes | None = None, ok: tuple[int, ...] = (0,)
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one command; GitError when its exit code is not among ``ok`` or there is no git."""
        try:
            done = subprocess.run(["git", *words], cwd=self.folder, input=stdin, capture_output=True, env=self._env())
        except FileNotFoundError as error:
            raise GitError(f"cannot run git in {self.folder}: {error}") from error
        if done.returncode not in ok:
            message = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise GitError(f"`git {' '.join(words[:6])}` failed in {self.folder}: {message}")
        return done

    def text(self, *words: str, stdin: bytes | None = None) -> str:
        return self.run(*words, stdin=stdin).stdout.decode(errors="replace").strip()

    def fields(self, *words: str) -> list[str]:
        """The parts of a ``-z`` output."""
        return [part for part in self.run(*words).stdout.decode(errors="surrogateescape").split("\0") if part]

    def commit(self, name: str) -> str | None:
        """The full id of the commit called ``name`` (a tag, branch or id); None when there is none."""
        done = self.run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", ok=(0, 1, 128))
        return done.stdout.decode().strip() or None

    def tree_of(self, commit: str, folder: str = "") -> str | None:
        """The tree of a commit's folder ("" = all of it); None when the commit has no such folder."""
        done = self.run("rev-parse", "--verify", "--quiet", f"{commit}:{folder.strip('/')}", ok=(0, 1, 128))
        oid = done.stdout.decode().strip()
        return oid if oid and self.text("cat-file", "-t", oid) == "tree" else None

    def files(self, tree: str) -> dict[str, TreeEntry]:
        """Path -> entry of every file below a tree."""
        found = {}
        for line in self.fields("ls-tree", "-r", "-z", tree):
            facts, path = line.split("\t", 1)
            mode, _, oid = facts.split()
            found[path] = TreeEntry(mode, oid)
        return found

    def blobs(self, oids: list[str]) -> dict[str, bytes]:
        """Id -> content of many blobs, by one command."""
        wanted = list(dict.fromkeys(oids))
        output = self.run("cat-file", "--batch", stdin="".join(f"{oid}\n" for oid in wanted).encode()).stdout
        found, position = {}, 0
        for oid in wanted:
            end = output.index(b"\n", position)
            size = int(output[position:end].split()[2])
            found[oid] = output[end + 1 : end + 1 + size]
            position = end + 1 + size + 1
        return found

    def checkout(self, paths: Iterable[str], target: Path) -> None:
        """Write the index's files at ``paths`` below ``target``; none that is there is touched."""
        listing = "".join(f"{path}\0" for path in paths).encode(errors="surrogateescape")
        self.run("checkout-index", "-q", "-z", "--stdin", f"--prefix={target}/", stdin=listing)

    def set_entries(self, entries: Iterable[str]) -> None:
        """Change the index by lines of ``git update-index --index-info``."""
        text = "".join(f"{entry}\0" for entry in entries)
        self.run("update-index", "-z", "--index-info", stdin=text.encode(errors="surrogateescape"))

    def write_blob(self, content: bytes) -> str:
        return self.text("hash-object", "-w", "--stdin", stdin=content)

    def commit_tree(self, tree: str, parents: list[str], message: str) -> str:
        words = [word for parent in parents for word in ("-p", parent)]
        return self.text("commit-tree", tree, *words, "-F", "-", stdin=message.encode())

    def git_path(self, name: str) -> Path:
        """Where git keeps ``name`` ("index", "MERGE_HEAD", or a name of ours) for this working tree."""
        return (self.folder / self.text("rev-parse", "--git-path", name)).resolve()

    def top(self) -> Path:
        return Path(self.text("rev-parse", "--show-toplevel")).resolve()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary folder inside of git's own, where what a killed command left is found (``move.stage``)."""
        base = self.git_path(SCRATCH)
        base.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base) as folder:
            yield Path(folder)

    def version(self) -> tuple[int, int]:
        numbers = self.text("version").split()[2].split(".")
        return int(numbers[0]), int(numbers[1])

    def _env(self) -> Mapping[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in REDIRECTS}
        env |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true"}
        if self.index:
            env["GIT_INDEX_FILE"] = str(self.index)
        return env
