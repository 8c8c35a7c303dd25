"""What `third_party/` says of a subtree that holds its upstream's files, at one version."""

from __future__ import annotations

from tools.subtree import manifest, snapshot, upstream
from tools.subtree.git import Git
from tools.subtree.manifest import FOLDER, Manifest

LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")


def of_version(
    git: Git, item: Manifest, manifest_text: str, tag: str, split: str, source: Git, commit: str
) -> dict[str, str]:
    """Path -> text: the manifest with the new pin, the API snapshot, the upstream's licence files.

    ``split`` is the commit here whose tree is the mirrored folder, ``commit`` the upstream's own, in ``source``.
    """
    return {
        item.path: manifest.with_pin(manifest_text, tag, commit),
        snapshot.path_of(item.name): _api(git, item, f"{split}^{{tree}}", tag),
        **(_licences(source, item, commit) if item.upstream_root else {}),
    }


def _api(git: Git, item: Manifest, tree: str, tag: str) -> str:
    with git.scratch() as scratch:
        recorded = snapshot.record(item, upstream.export(git, tree, scratch), tag)
    return snapshot.render(item.name, recorded)


def _licences(source: Git, item: Manifest, commit: str) -> dict[str, str]:
    """The licence files at the upstream's root: a folder that is taken alone would come without them."""
    names = source.fields("ls-tree", "-z", "--name-only", commit)
    wanted = [name for name in names if name.upper().startswith(LICENCE_FILES)]
    return {f"{FOLDER}/licences/{item.name}/{name}": source.text("show", f"{commit}:{name}") + "\n" for name in wanted}
