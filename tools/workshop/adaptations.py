"""Lists the blocks of code that are there for the hardware alone; third_party/ADAPTATIONS.md is this list."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from hf_formats.files import write_text
from tools.marks import ROOT, WORD, Adaptation, collect
from tools.workshop.removals import prove, read_registry

OUTPUT = Path("third_party/ADAPTATIONS.md")
COMMAND = "tools.workshop.adaptations"


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=__doc__)
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
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def run(root: Path, check: bool) -> str:
    """Write the list, or with ``check`` compare it; returns the line to show. ValueError names every problem.

    Wrong marks keep the list from being written; a missing or wrong proof is reported after it is written.
    """
    found, problems = collect(root)
    proofs, wrong_proofs = read_registry(root, found)
    text = render(found, {name: proof.test for name, proof in proofs.items()})
    path = root / OUTPUT
    if check and not problems and (not path.exists() or path.read_text(encoding="utf-8") != text):
        problems.append(f"{OUTPUT} does not agree with the marks: run `python -m {COMMAND}` and commit it")
    if not check and not problems:
        write_text(path, text)
    problems += wrong_proofs
    if problems:
        raise ValueError("\n  ".join([f"{len(problems)} problem(s) with {WORD} marks:", *problems]))
    return f"{len(found)} adaptation(s), {'in order' if check else f'written to {OUTPUT}'}"


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
            f"The blocks of code that are there for the hardware alone. `python -m {COMMAND}` writes this page",
            f"from the `{WORD}` marks in the sources, and CI checks that it is up to date. Do not edit it.",
            "",
            "A marked block is an addition to the plain way, or an override of it. The test in the last column passes,",
            f"and fails when the block is deleted: `python -m {COMMAND} --prove [ID ...]` shows it on a copy of",
            "the tree. That proves what the block does on a CPU or a simulated NPU, not that hardware still needs it.",
            "",
            "Some forms are shared by every device because one needs them. No plainer way would be left without them,",
            "so they carry no mark, only a comment. Sampling noise is made without an integer shift and 64-bit numbers",
            "are summed as 32-bit ones, for the vector cores; experts are exchanged in a group of their own, for MC2.",
            "",
            "| id | file | what the hardware needs | drop when | proved by |",
            "|---|---|---|---|---|",
            *(rows or ["| | | none yet | | |"]),
            "",
        ]
    )


def _show_proofs(root: Path, ids: list[str]) -> bool:
    """Print the verdicts as they come; whether none of them is bad."""
    words = {True: "proven", False: "NOT PROVEN", None: "SKIPPED"}
    verdicts = []
    for verdict in prove(root, ids):
        verdicts.append(verdict)
        print(f"{words[verdict.is_proven]:<10}  {verdict.id:<22} {verdict.path}")
        print(f"{'':12}{verdict.test}\n{'':12}{verdict.why}", flush=True)
    counts = [f"{sum(v.is_proven is value for v in verdicts)} {word.lower()}" for value, word in words.items()]
    print(f"{len(verdicts)} adaptation(s): {', '.join(counts)}")
    return all(verdict.is_proven is not False for verdict in verdicts)


if __name__ == "__main__":
    main()
