"""`python -m tools.subtree list | status | adaptations | diff | rebase | import`.

Exit codes: 0 done, 1 refused or failed with nothing changed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.subtree import compare, manifest, rebase, show, upstream
from tools.workshop import adaptations

UPSTREAM = (
    "git url, `pypi:NAME` (a released package), local clone, folder, wheel or sdist, or name of an installed package "
    "(default: the manifest's url, or its released package where the url cannot be reached)"
)


def main(words: list[str] | None = None) -> None:
    args = _parser().parse_args(words)
    console = Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 160)
    try:
        args.run(console, args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.subtree", description="Our subtrees beside their upstreams.")
    parser.add_argument("--root", type=Path, default=manifest.ROOT, help="the repository (default: this one)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object, text: str, takes_name: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        if takes_name:
            command.add_argument("name", help="the upstream's name, as `list` shows it")
            command.add_argument("--upstream", help=UPSTREAM)
        return command

    add("list", _list, "the upstreams, their pins and licences")
    status = add("status", _status, "what is mirrored, the API beside the recorded one, the adaptations")
    status.add_argument("--names", action="store_true", help="show the public names that differ, module by module")
    marks = add("adaptations", _adaptations, f"list the adaptations and write {adaptations.OUTPUT}")
    marks.add_argument("--check", action="store_true", help="write nothing, fail when the file is not up to date")
    diff = add("diff", _diff, "our folder against its upstream, by API and by text", takes_name=True)
    diff.add_argument("--tag", help="another version than the pinned one, of a git upstream")
    diff.add_argument("--names", action="store_true", help="show the public names that differ, module by module")
    diff.add_argument("--text", action="store_true", help="a unified diff of each module that both have")
    move_to = add("rebase", _rebase, "list the work that a new version of an upstream makes", takes_name=True)
    move_to.add_argument("--tag", required=True, help="the upstream's new tag, branch or commit")
    move_to.add_argument("--from", dest="old", help="the old version (default: the pinned one)")
    move_to.add_argument("--list", type=Path, metavar="FILE", help="write the list to FILE instead of printing it")
    move_to.add_argument("--text", action="store_true", help="also show the upstream's own changes as unified diffs")
    taker = add("import", _import, "record the API of what we mirror, and a new pin", takes_name=True)
    taker.add_argument("--tag", help="the version to record; it becomes the pin (default: the pinned one)")
    return parser


def _list(console: Console, args: argparse.Namespace) -> None:
    show.listing(console, _all(args))


def _status(console: Console, args: argparse.Namespace) -> None:
    show.status(console, _all(args), args.root, args.names)


def _adaptations(console: Console, args: argparse.Namespace) -> None:
    show.adaptation_list(console, args.root, _all(args))
    show.say(console, adaptations.run(args.root, check=args.check))


def _diff(console: Console, args: argparse.Namespace) -> None:
    item = _named(args)
    ours = compare.our_folder(item, args.root)
    with upstream.checkout(item, args.upstream, args.tag or item.version) as theirs:
        show.say(console, f"{ours.name}/ beside {theirs.source}; pinned: {item.version}")
        different = compare.diff(item, theirs.folder, args.root)
        show.difference(console, item, different, args.names)
        for module in [shared.module for shared in different.shared] if args.text else []:
            sides = [compare.read(side / module) for side in (theirs.folder, ours)]
            names = (f"upstream/{module}", f"{item.subtree}/{module}")
            show.say(console, compare.text_diff(sides[0], sides[1], *names))


def _rebase(console: Console, args: argparse.Namespace) -> None:
    item = _named(args)
    item = replace(item, tag=args.old) if args.old else item
    outcome = rebase.rebase(args.root, item, args.tag, args.upstream)
    show.rebased(console, item, outcome, args.root, args.text, args.list)


def _import(console: Console, args: argparse.Namespace) -> None:
    api, source, paths = rebase.record_api(args.root, _named(args), args.tag, args.upstream)
    num_names = sum(map(len, api.modules.values()))
    show.say(
        console,
        f"{args.name} {api.pin}: {num_names} names of {len(api.modules)} modules, from {source}",
        f"Next: `python -m tools.subtree status --names`, then commit {' and '.join(paths)}.",
    )


def _named(args: argparse.Namespace) -> manifest.Manifest:
    return manifest.load(args.name, args.root / manifest.FOLDER)


def _all(args: argparse.Namespace) -> list[manifest.Manifest]:
    return manifest.load_all(args.root / manifest.FOLDER)


if __name__ == "__main__":
    main()
