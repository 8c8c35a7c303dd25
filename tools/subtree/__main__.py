"""`python -m tools.subtree list | status | adaptations | diff | rebase | import`.

Exit codes: 0 done, 1 refused or failed with nothing changed, 2 wrong arguments, 3 a merge waits for a person.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from tools.subtree import compare, manifest, move, rebase, show, upstream
from tools.subtree.git import Git
from tools.workshop import adaptations

CONFLICTS = 3
UPSTREAM = "git url, local clone, folder, wheel or sdist, or name of an installed package (default: the manifest's url)"


def main(words: list[str] | None = None) -> None:
    args = _parser().parse_args(words)
    console = Console(soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 160)
    try:
        if (args.root / ".git").exists():
            show.say(console, *move.recover(Git(args.root)))
        code = args.run(console, args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.exit(code)


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
    move_to = add("rebase", _rebase, "show what a version changes; merge it where we hold the files", takes_name=True)
    move_to.add_argument("--tag", required=True, help="the upstream's new tag, branch or commit")
    move_to.add_argument("--text", action="store_true", help="also show the upstream's own changes as unified diffs")
    move_to.add_argument("--dry-run", action="store_true", help="merge, say what would happen, change nothing")
    taker = add(
        "import", _import, "record an upstream's API, or (--files) take its files as a subtree", takes_name=True
    )
    taker.add_argument("--tag", help="the version to record or take; it becomes the pin (default: the pinned one)")
    taker.add_argument("--files", action="store_true", help="take the files, as one squash merge commit")
    for option, text in (("url", "its git url"), ("licence", "its SPDX licence"), ("folder", "our folder")):
        taker.add_argument(f"--{option}", help=f"for an upstream without a manifest: {text}")
    taker.add_argument(
        "--upstream-root", default="", help="... the folder of its checkout to take (default: all of it)"
    )
    return parser


def _list(console: Console, args: argparse.Namespace) -> None:
    show.listing(console, _all(args))


def _status(console: Console, args: argparse.Namespace) -> None:
    show.status(console, _all(args), args.root, args.names)


def _adaptations(console: Console, args: argparse.Namespace) -> None:
    show.adaptation_list(console, args.root, _all(args))
    show.say(console, adaptations.run(args.root, check=args.check))


def _diff(console: Console, args: argparse.Namespace) -> None:
    item = manifest.load(args.name, args.root / manifest.FOLDER)
    ours = compare.our_folder(item, args.root)
    with upstream.checkout(item, args.upstream, args.tag or item.version) as (folder, what):
        show.say(console, f"{ours.name}/ beside {what}; pinned: {item.version}")
        different = compare.diff(item, folder, args.root)
        show.difference(console, different, args.names)
        for module in [shared.module for shared in different.shared] if args.text else []:
            sides = [(side / module).read_text(encoding="utf-8", errors="replace") for side in (folder, ours)]
            names = (f"upstream/{module}", f"{item.subtree}/{module}")
            show.say(console, compare.text_diff(sides[0], sides[1], *names))


def _rebase(console: Console, args: argparse.Namespace) -> int:
    item = manifest.load(args.name, args.root / manifest.FOLDER)
    outcome = rebase.rebase(args.root, args.name, args.tag, args.upstream, args.dry_run)
    show.rebased(console, args.name, item.subtree, outcome, args.text, args.dry_run)
    return CONFLICTS if outcome.conflicts or outcome.findings else 0


def _import(console: Console, args: argparse.Namespace) -> None:
    path = args.root / manifest.FOLDER / f"{args.name}.toml"
    if not args.files:
        item = manifest.load(args.name, path.parent)
        api, what, paths = rebase.record_api(args.root, item, args.tag, args.upstream)
        num_names = sum(map(len, api.modules.values()))
        show.say(
            console,
            f"{args.name} {api.pin}: {num_names} names of {len(api.modules)} modules, from {what}",
            f"Next: `python -m tools.subtree status --names`, then commit {' and '.join(paths)}.",
        )
        return
    text = path.read_text(encoding="utf-8") if path.exists() else _new_manifest(args)
    item = manifest.parse(manifest.with_pin(text, args.tag, "") if args.tag else text, str(path))
    commit = rebase.take_files(args.root, item, text, item.version, args.upstream)
    show.say(
        console,
        f"Done: commit {commit[:12]} holds {item.subtree}/ of {args.name} {item.version}, licence {item.licence}.",
        *([f"Licence: {item.licence_note}"] if item.licence_note else []),
        f"Next: mark what you change for hardware; `python -m tools.subtree rebase {args.name} --tag ...` keeps it.",
    )


def _new_manifest(args: argparse.Namespace) -> str:
    missing = [f"--{option}" for option in ("tag", "licence") if not getattr(args, option)]
    if not args.url and not args.upstream:
        missing.append("--url")
    if missing:
        raise ValueError(f"there is no {manifest.FOLDER}/{args.name}.toml: to make one, also give {', '.join(missing)}")
    url, folder = args.url or args.upstream, args.folder or args.name
    return manifest.text_of(args.name, url, args.licence, folder, args.upstream_root)


def _all(args: argparse.Namespace) -> list[manifest.Manifest]:
    return manifest.load_all(args.root / manifest.FOLDER)


if __name__ == "__main__":
    main()
