"""Lists every place where shared code bends for the hardware, and keeps third_party/ADAPTATIONS.md equal to them."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = Path("third_party/ADAPTATIONS.md")
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
    end_line: int | None  # of the END mark; None when the mark covers one statement
    what: str
    drop_when: str


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.adaptations", description=__doc__)
    parser.add_argument("--check", action="store_true", help=f"fail when {OUTPUT} or a mark is not in order")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: this one)")
    parser.add_argument(
        "--prove",
        nargs="*",
        metavar="ID",
        help="delete each marked block (or those of the IDs) in a copy of the tree and see its test fail there",
    )
    args = parser.parse_args()
    try:
        if args.prove is not None:
            sys.exit(0 if _show_proofs(args.root, args.prove) else 1)
        print(run(args.root, check=args.check))
    except ValueError as error:
        sys.exit(f"error: {error}")


def run(root: Path, check: bool) -> str:
    """Write the list, or with ``check`` compare it; returns the line to show. ValueError names every problem.

    Wrong marks keep the list from being written; a missing or wrong proof is told after it.
    """
    from tools import removals  # it stands on this module

    found, problems = collect(root)
    text = render(found, {name: proof.test for name, proof in removals.read_registry(root)[0].items()})
    path = root / OUTPUT
    if check and not problems and (not path.exists() or path.read_text(encoding="utf-8") != text):
        problems.append(f"{OUTPUT} is not what the marks say: run `python -m tools.adaptations` and commit it")
    if not check and not problems:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    problems += removals.registry_problems(root, found)
    if problems:
        raise ValueError("\n  ".join([f"{len(problems)} problem(s) with {WORD} marks:", *problems]))
    return f"{len(found)} adaptation(s), {'in order' if check else f'written to {OUTPUT}'}"


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
                found[-1] = _closed(found[-1], index + 1)
        elif mark := MARK.match(line):
            text = " ".join([mark["text"], *_continuation(lines[index + 1 :])])
            what, separator, condition = text.partition("; drop when ")
            if not ID.fullmatch(mark["id"]) or not separator or not what.strip() or not condition.strip():
                problems.append(f"{where}: expected `{FORM}` with an id of lower-case words and hyphens")
            found.append(Adaptation(mark["id"], path, index + 1, None, what.strip(), condition.strip().rstrip(".")))
        elif ANY.match(line):
            problems.append(f"{where}: expected `{FORM}` or `# {WORD} END`")
    return found, problems


def render(found: Iterable[Adaptation], proving_tests: dict[str, str]) -> str:
    """The generated document; `proving_tests` by id."""
    rows = [
        f"| `{a.id}` | `{a.path}` | {a.what} | {a.drop_when} | `{proving_tests.get(a.id, 'none')}` |"
        for a in sorted(found, key=lambda a: (a.path, a.line))
    ]
    return "\n".join(
        [
            "# Adaptations",
            "",
            "Every place where shared code bends for the hardware. Written by `python -m tools.adaptations` from the",
            f"`{WORD}` marks in the sources; CI checks that it is up to date. Do not edit.",
            "",
            "The test in the last column passes, and fails when the marked block is deleted:",
            "`python -m tools.adaptations --prove [ID ...]` shows it on a copy of the tree.",
            "",
            "| id | file | what the hardware needs | drop when | proved by |",
            "|---|---|---|---|---|",
            *(rows or ["| | | none yet | | |"]),
            "",
        ]
    )


def _closed(mark: Adaptation, end_line: int) -> Adaptation:
    return Adaptation(mark.id, mark.path, mark.line, end_line, mark.what, mark.drop_when)


def _continuation(lines: list[str]) -> Iterator[str]:
    """The comment lines straight after a mark's first line: the sentence may be long."""
    for line in lines:
        comment = COMMENT.match(line)
        if not comment or ANY.match(line):
            return
        yield comment["text"].strip()


def _show_proofs(root: Path, ids: list[str]) -> bool:
    """Print the verdicts as they come; whether none of them is bad."""
    from tools import removals

    words = {True: "proven", False: "NOT PROVEN", None: "SKIPPED"}
    verdicts = []
    for verdict in removals.prove(root, ids):
        verdicts.append(verdict)
        print(f"{words[verdict.is_proven]:<10}  {verdict.id:<22} {verdict.path}")
        print(f"{'':12}{verdict.test}\n{'':12}{verdict.why}", flush=True)
    counts = [f"{sum(v.is_proven is value for v in verdicts)} {word.lower()}" for value, word in words.items()]
    print(f"{len(verdicts)} adaptation(s): {', '.join(counts)}")
    return all(verdict.is_proven is not False for verdict in verdicts)


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


if __name__ == "__main__":
    main()
