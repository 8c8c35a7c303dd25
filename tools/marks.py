"""The marks of hardware adaptations in the sources: where each is, what the hardware needs, when it can go."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORD = "NPU-ADAPTATION"
FORM = f"# {WORD}(<id>): <what the hardware needs>; drop when <condition>"
MARK = re.compile(rf"^\s*#\s*{WORD}\((?P<id>[^)]*)\):\s*(?P<text>.*)$")
END = re.compile(rf"^\s*#\s*{WORD} END\s*$")
ANY = re.compile(rf"^\s*#\s*{WORD}\b")
COMMENT = re.compile(r"^\s*#\s?(?P<text>.*)$")
ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
SUFFIXES = {".py", ".sh", ".yaml", ".yml", ".toml", ".txt", ".cpp", ".h"}


@dataclass(frozen=True)
class Adaptation:
    """One marked place: where it is, what the hardware needs there, and when it can go."""

    id: str
    path: str
    line: int
    end_line: int | None  # the END mark's line; None when the mark covers one statement
    what: str
    drop_when: str


def collect(root: Path) -> tuple[list[Adaptation], list[str]]:
    """Every mark of the tree, in order of path and line, and what is wrong with them."""
    found: list[Adaptation] = []
    problems: list[str] = []
    for path in filter(_may_carry_marks, listed_files(root)):
        lines = (root / path).read_text(encoding="utf-8", errors="replace").splitlines()
        marks, wrong = parse(path, lines)
        found += marks
        problems += wrong
    seen: dict[str, Adaptation] = {}
    for mark in found:
        other = seen.setdefault(mark.id, mark)
        if other is not mark:
            problems.append(f"{mark.path}:{mark.line}: id '{mark.id}' is already used at {other.path}:{other.line}")
    return found, problems


def parse(path: str, lines: list[str]) -> tuple[list[Adaptation], list[str]]:
    """The marks of one file and what is wrong with them."""
    found: list[Adaptation] = []
    problems: list[str] = []
    for index, line in enumerate(lines):
        where = f"{path}:{index + 1}"
        if END.match(line):
            if not found or found[-1].end_line is not None:
                problems.append(f"{where}: END closes nothing")
            else:
                found[-1] = replace(found[-1], end_line=index + 1)
        elif mark := MARK.match(line):
            text = " ".join([mark["text"], *_continuation(lines[index + 1 :])])
            what, separator, condition = text.partition("; drop when ")
            if not ID.fullmatch(mark["id"]) or not separator or not what.strip() or not condition.strip():
                problems.append(f"{where}: expected `{FORM}` with an id of lower-case words and hyphens")
            found.append(Adaptation(mark["id"], path, index + 1, None, what.strip(), condition.strip().rstrip(".")))
        elif ANY.match(line):
            problems.append(f"{where}: expected `{FORM}` or `# {WORD} END`")
    return found, problems


def _continuation(lines: list[str]) -> Iterator[str]:
    """The comment lines straight after a mark's first line: the sentence may be long."""
    for line in lines:
        comment = COMMENT.match(line)
        if not comment or ANY.match(line):
            return
        yield comment["text"].strip()


def listed_files(root: Path) -> list[str]:
    """The tree's files: tracked or new in git, or every one that is not hidden when the tree came without git."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True
    )
    if listing.returncode == 0:
        names = set(listing.stdout.splitlines())
    else:
        inside = [path.relative_to(root) for path in root.rglob("*")]
        names = {path.as_posix() for path in inside if not any(part.startswith(".") for part in path.parts)}
    return sorted(name for name in names if (root / name).is_file())


def _may_carry_marks(name: str) -> bool:
    path = Path(name)
    return path.suffix in SUFFIXES or path.name.startswith("Dockerfile")
