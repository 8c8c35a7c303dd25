"""``python -m tools.workshop.reference --write`` makes ``docs/parameters.md`` from the config, ``--check`` compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_formats.files import write_text
from tools.workshop.reference.page import COMMAND, render
from tools.workshop.reference.parameters import sections

PAGE = Path(__file__).resolve().parents[3] / "docs" / "parameters.md"
EXIT_DIFFERENT = 1


def problems(page: Path = PAGE) -> list[str]:
    """Keys without a meaning, and a page that is not current, one sentence each."""
    found = [
        f"{item.key} has no meaning: write it behind #: above the key or in its line"
        for section in sections()
        for item in section.parameters
        if not item.meaning
    ]
    written = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    if written != render():
        found.append(f"{page} is not what the config says: {COMMAND} --write")
    return found


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 when the page is not current or a key has no meaning."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--write", action="store_true", help="write the page")
    todo.add_argument("--check", action="store_true", help="only say whether the page is current")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/parameters.md")
    arguments = parser.parse_args(argv)
    if arguments.write:
        try:
            write_text(arguments.page, render())
        except OSError as error:
            parser.error(f"--page: {error}")
    found = problems(arguments.page)
    for problem in found:
        print(problem, file=sys.stderr)
    return EXIT_DIFFERENT if found else 0


if __name__ == "__main__":
    sys.exit(main())
