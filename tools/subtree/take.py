"""`import`: records the API of an upstream's version, or takes the upstream's files as a new subtree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tools.subtree import compose, fork, manifest, move, records, snapshot, upstream
from tools.subtree.git import Git
from tools.subtree.manifest import Manifest


@dataclass(frozen=True)
class Recorded:
    """What was written."""

    what: str  # where the API came from
    pin: str
    num_modules: int
    num_symbols: int
    paths: tuple[str, ...]


def record_api(root: Path, item: Manifest, tag: str | None, spec: str | None) -> Recorded:
    """Write the API snapshot of the mirrored modules, and with ``tag`` the new pin; nothing is committed.

    ValueError when the upstream lacks a mirrored module: the manifest would not be true.
    """
    pin = tag or item.version
    with upstream.checkout(item, spec, pin) as found:
        recorded = snapshot.record(item, found.folder, pin)
        what = found.what
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
        _write(root / path, text)
    return Recorded(what, pin, len(recorded.modules), recorded.num_symbols(), tuple(written))


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
    source = upstream.repository(item, spec)
    if source is None:
        raise ValueError(f"{spec} is no git repository: files are taken from one, so that later versions can be merged")
    commit = upstream.resolve(source, tag, spec or item.url)
    with move.stage(git) as folder:
        split = fork.fetch_split(git, source, commit, item.upstream_root)
        files = records.of_version(git, item, manifest_text, tag, split, source, commit)
        squash = fork.squash(git, item.subtree, f"{split}^{{tree}}", split, None)
        tree = compose.composed(git, "HEAD", item.subtree, f"{split}^{{tree}}", files)
        message = f"Take {item.name} {tag} as {item.subtree}/\n\nFrom {item.url}, licence {item.licence}.\n"
        return str(compose.move_in(git, folder, tree, squash, message, None, item.subtree))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
