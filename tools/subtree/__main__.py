"""`python -m tools.subtree list | status | diff NAME --upstream PATH`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.subtree import compare, manifest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.subtree", description="Our subtrees beside their upstreams.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the upstreams, their pins and licences")
    commands.add_parser("status", help="which of the mirrored modules are here")
    differ = commands.add_parser("diff", help="one subtree against a checkout of its upstream")
    differ.add_argument("name", help="the upstream's name, as `list` shows it")
    differ.add_argument("--upstream", type=Path, required=True, help="a local checkout at the pinned version")
    differ.add_argument("--names", action="store_true", help="show the public names that differ, module by module")
    args = parser.parse_args()
    console = Console()
    try:
        if args.command == "list":
            console.print(_list_table(manifest.load_all()))
        elif args.command == "status":
            console.print(_status_table(manifest.load_all()))
        else:
            _show_diff(console, compare.diff(manifest.load(args.name), args.upstream), args.names)
    except ValueError as error:
        sys.exit(f"error: {error}")


def _list_table(manifests: list[manifest.Manifest]) -> Table:
    table = Table("upstream", "version", "licence", "our folder", "url")
    for item in manifests:
        pin = f"{item.version} ({item.commit})" if item.tag and item.commit else item.version
        table.add_row(item.name, pin, item.licence, item.subtree or "(facts only)", item.url)
    return table


def _status_table(manifests: list[manifest.Manifest]) -> Table:
    table = Table("upstream", "mirrored modules here", "not here yet")
    for item in manifests:
        present, absent = compare.status(item)
        table.add_row(item.name, f"{len(present)} of {len(item.mirrored)}", "\n".join(absent))
    return table


def _show_diff(console: Console, found: compare.SubtreeDiff, show_names: bool) -> None:
    table = Table("module", "same", "differs", "missing", "ours only")
    for item in found.shared:
        counts = (item.same, item.differs, item.missing, item.ours_only)
        table.add_row(item.module, *(str(len(names)) for names in counts))
    console.print(table)
    for item in found.shared if show_names else ():
        for name, ours, theirs in item.differs:
            console.print(f"{item.module}: {name}\n    ours     {ours}\n    upstream {theirs}", highlight=False)
        for name in item.missing:
            console.print(f"{item.module}: {name} is missing here", highlight=False)
    console.print(f"{len(found.shared)} modules on both sides, {len(found.missing)} only upstream")
    for module in found.ours_only:
        console.print(f"ours only: {module}", highlight=False)


if __name__ == "__main__":
    main()
