"""Git repositories for the tests of the subtree tool: an upstream with several tags, and ours beside it."""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

from tools import marks
from tools.subtree.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
MARK = "# " + marks.WORD  # assembled, so that this file carries no mark of its own


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"git {words}: {done.stderr}{done.stdout}"
    return done.stdout.strip()


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("@", MARK), encoding="utf-8")
    return path


def repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "config", "user.name", "Tester")
    git(folder, "config", "user.email", "tester@example.org")
    return folder


def commit(folder: Path, message: str, tag: str = "") -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)
    if tag:
        git(folder, "tag", tag)
    return git(folder, "rev-parse", "HEAD")


def tool(root: Path, *words: str, code: int = 0) -> str:
    """Run the command, in this process, on the repository ``root``; its output, when it ends with ``code``."""
    output, failure, found = io.StringIO(), "", 0
    try:
        with redirect_stdout(output):
            main(["--root", str(root), *words])
    except SystemExit as ended:
        failure, found = (ended.code, 1) if isinstance(ended.code, str) else ("", int(ended.code or 0))
    assert found == code, f"{words}: {found}\n{output.getvalue()}{failure}"
    return output.getvalue() + failure


def state(root: Path) -> tuple[str, str, dict[str, str]]:
    """What a command that only reports must leave alone: HEAD, git's view of the tree, and the files."""
    files = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }
    return git(root, "rev-parse", "HEAD"), git(root, "status", "--porcelain"), files


def export(folder: Path, version: str, target: Path) -> Path:
    """The files of a version without git."""
    target.mkdir()
    for name in git(folder, "ls-tree", "-r", "--name-only", version).splitlines():
        write(target / name, git(folder, "show", f"{version}:{name}") + "\n")
    return target


LINES = "".join(f"line_{number} = {number}\n" for number in range(1, 31))


def upstream(folder: Path) -> Path:
    """A package in the folder ``pkg`` of its repository: v1, and a tag for each kind of change after it."""
    up = repository(folder)
    pkg = up / "pkg"
    write(pkg / "__init__.py", "")
    write(pkg / "clean.py", LINES)
    write(pkg / "old_name.py", LINES.replace("line", "moved"))
    write(
        pkg / "helpers.py",
        "def kept(x):\n    return x\n\n\ndef used_by_us(x):\n    return x + 1\n\n\ndef unused():\n    return 0\n",
    )
    write(pkg / "gone.py", "def whole_file():\n    return 1\n")
    (pkg / "link.py").symlink_to("/etc/hostname")
    commit(up, "v1", "v1")
    write(pkg / "clean.py", LINES.replace("line_2 = 2", "line_2 = 222").replace("line_29 = 29", "line_29 = 2929"))
    commit(up, "clean", "v1.1")
    git(up, "mv", "pkg/old_name.py", "pkg/new_name.py")
    write(pkg / "new_name.py", LINES.replace("line", "moved").replace("moved_3 = 3", "moved_3 = 333"))
    (pkg / "gone.py").unlink()
    write(pkg / "brand_new.py", "def fresh(a, b=1):\n    return a\n")
    commit(up, "rename, delete, new file", "v1.3")
    write(pkg / "helpers.py", "def kept(x, scale=1):\n    return x * scale\n\n\ndef unused():\n    return 0\n")
    commit(up, "a function is deleted that we have", "v1.4")
    return up
