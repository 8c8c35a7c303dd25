"""Git repositories for the tests of the subtree tool: an upstream with three tags, and ours that holds its files."""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tools import marks
from tools.subtree.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
MARK = "# " + marks.WORD  # assembled, so that this file carries no mark of its own
LICENCE = ("--licence", "MIT")


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
    output, failure = io.StringIO(), ""
    with redirect_stdout(output), pytest.raises(SystemExit) as ended:
        main(["--root", str(root), *words])
    found = ended.value.code or 0
    if isinstance(found, str):
        failure, found = found, 1
    assert found == code, f"{words}: {found}\n{output.getvalue()}{failure}"
    return output.getvalue() + failure


def state(root: Path) -> tuple[str, str, dict[str, str]]:
    """What an interrupted command must leave alone: HEAD, git's view of the tree, and the files."""
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


BLOCKS = ("clean", "both", "moved")
LINES = "".join(f"line_{number} = {number}\n" for number in range(1, 31))


def upstream(folder: Path, inside: str = "pkg") -> Path:
    """A package in the folder ``inside`` of its repository: v1, and a tag for each kind of change after it."""
    up = repository(folder)
    pkg = up / inside
    write(up / "README.md", "an upstream\n")
    write(up / "LICENSE", "do as you like\n")
    write(pkg / "__init__.py", "")
    write(pkg / "clean.py", LINES)
    write(pkg / "both.py", LINES)
    write(pkg / "old_name.py", LINES.replace("line", "moved"))
    write(
        pkg / "helpers.py",
        "def kept(x):\n    return x\n\n\ndef used_by_us(x):\n    return x + 1\n\n\ndef unused():\n    return 0\n",
    )
    write(pkg / "changed_by_us.py", "def stays():\n    return 1\n\n\ndef goes(a):\n    b = a + 1\n    return b\n")
    write(pkg / "gone.py", "def whole_file():\n    return 1\n")
    write(pkg / "gone_untouched.py", "UNTOUCHED = 1\n")
    commit(up, "v1", "v1")
    write(up / "README.md", "an upstream, second version\n")
    write(pkg / "clean.py", LINES.replace("line_2 = 2", "line_2 = 222").replace("line_29 = 29", "line_29 = 2929"))
    commit(up, "clean", "v1.1")
    write(pkg / "both.py", LINES.replace("line_15 = 15", "line_15 = 1515"))
    commit(up, "conflict", "v1.2")
    git(up, "reset", "--quiet", "--hard", "v1.1")
    git(up, "mv", f"{pkg}/old_name.py", f"{pkg}/new_name.py")
    write(pkg / "new_name.py", LINES.replace("line", "moved").replace("moved_3 = 3", "moved_3 = 333"))
    (pkg / "gone_untouched.py").unlink()
    write(pkg / "brand_new.py", "def fresh(a, b=1):\n    return a\n")
    commit(up, "rename, delete, new file", "v1.3")
    write(pkg / "helpers.py", "def kept(x, scale=1):\n    return x * scale\n\n\ndef unused():\n    return 0\n")
    commit(up, "a function is deleted that the fork calls", "v1.4")
    git(up, "reset", "--quiet", "--hard", "v1.3")
    write(pkg / "changed_by_us.py", "def stays():\n    return 1\n")
    (pkg / "gone.py").unlink()
    commit(up, "a function and a file are deleted that the fork changed", "v1.5")
    return up


def fork(folder: Path, up: Path) -> Path:
    """Ours: ``pkg`` taken from the upstream at v1, then changed for the hardware, with a caller outside of it."""
    root = repository(folder)
    write(root / "README.md", "ours\n")
    write(root / "third_party/ADAPTATIONS.md", "")
    commit(root, "start")
    words = ("--upstream-root", "pkg", "--url", str(up))
    tool(root, "import", "pkg", "--files", "--tag", "v1", "--upstream", str(up), *LICENCE, *words)
    block = "@(mid-block): the device wants it; drop when it does not\nline_15 = 'ours'\nline_15b = 'ours'\n@ END\n"
    for name in ("clean", "both"):
        write(root / f"pkg/{name}.py", LINES.replace("line_15 = 15\n", block.replace("mid", name)))
    moved = LINES.replace("line", "moved")
    write(
        root / "pkg/old_name.py",
        moved.replace("moved_20 = 20\n", block.replace("mid", "moved").replace("line_15", "moved_20")),
    )
    write(
        root / "pkg/changed_by_us.py", "def stays():\n    return 1\n\n\ndef goes(a):\n    b = a + 1000\n    return b\n"
    )
    write(root / "pkg/gone.py", "def whole_file():\n    return 'ours'\n")
    write(root / "pkg/only_ours.py", "OURS = True\n")
    write(
        root / "caller.py",
        "from pkg.helpers import used_by_us\nimport pkg.helpers as h\n\nprint(used_by_us(1), h.used_by_us(2))\n",
    )
    proof = '= { test = "tests/test_it.py::test_it", env = "main" }'
    write(root / "tests/adaptations/removals.toml", "".join(f'"{name}-block" {proof}\n' for name in BLOCKS))
    write(root / "tests/test_it.py", "def test_it(): ...\n")
    tool(root, "adaptations")
    commit(root, "our changes")
    return root
