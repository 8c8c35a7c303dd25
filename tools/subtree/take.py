"""`import`: records the API of an upstream's version, or takes the upstream's files as a new subtree."""

from __future__ import annotations

import os
from pathlib import Path

from recipes.common.atomic_files import write_text_atomically
from tools.subtree import compose, fork, manifest, move, snapshot, upstream
from tools.subtree.git import Git
from tools.subtree.manifest import Manifest
from tools.subtree.snapshot import Snapshot


def record_api(root: Path, item: Manifest, tag: str | None, spec: str | None) -> tuple[Snapshot, str, list[str]]:
    """Write the API snapshot of the mirrored modules, and with ``tag`` the new pin; nothing is committed.

    Returns the API, where it came from, and the paths that were written.

    ValueError when the upstream lacks a mirrored module: the manifest would not be true.
    """
    pin = tag or item.version
    with upstream.checkout(item, spec, pin) as (folder, what):
        recorded = snapshot.record(item, folder, pin)
    absent = [module for module in item.mirrored_paths if module not in recorded.modules]
    if absent:
        raise ValueError(f"{what} has no {', '.join(absent)}: correct 'mirrored' in {item.path} first")
    written = {snapshot.path_of(item.name): snapshot.render(item.name, recorded)}
    if tag and tag != item.version:
        source = upstream.repository(item, spec, (tag,))
        commit = upstream.resolve(source, tag, spec or item.url) if source else ""
        text = (root / item.path).read_text(encoding="utf-8")
        written[item.path] = manifest.with_pin(text, tag, commit)
    for path, text in written.items():
        write_text_atomically(root / path, text)
    return recorded, what, list(written)


def take_files(root: Path, item: Manifest, manifest_text: str, tag: str, spec: str | None) -> str:
    """Take the upstream's folder at ``tag`` as a new subtree: one merge commit, as `git subtree add --squash` makes.

    Returns the commit. ValueError, and nothing changed, when the tree is not clean or the folder is there.
    """
    git = Git(root)
    compose.require_clean(git)
    if not item.subtree:
        raise ValueError(f"{item.path} has subtree = '': say which folder takes the files")
    if git.tree_of("HEAD", item.subtree) or os.path.lexists(root / item.subtree):
        raise ValueError(
            f"{item.subtree}/ is there already: `rebase {item.name} --tag {tag}` moves it to another version"
        )
    with move.stage(git) as folder:
        split, files = compose.fetch_version(git, item, manifest_text, tag, spec)
        squash = fork.squash(git, item.subtree, f"{split}^{{tree}}", split, None)
        tree = compose.composed(git, "HEAD", item.subtree, f"{split}^{{tree}}", files)
        message = f"Take {item.name} {tag} as {item.subtree}/\n\nFrom {item.url}, licence {item.licence}.\n"
        return str(compose.move_in(git, folder, tree, squash, message, None, item.subtree))
