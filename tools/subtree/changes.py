"""What a new version of an upstream changes in the modules that we mirror."""

from __future__ import annotations

from tools.subtree.api import api_of
from tools.subtree.compare import SubtreeDiff, module_diff, text_diff
from tools.subtree.git import Git
from tools.subtree.manifest import Manifest


def between(git: Git, old_tree: str, new_tree: str, manifest: Manifest) -> SubtreeDiff:
    """What changes between two trees of a repository in what we mirror, renames followed.

    New modules are those of the whole folder, as any of them may matter.
    """
    renamed, added, deleted = _moves(git, old_tree, new_tree)
    old, new = texts(git, old_tree), texts(git, new_tree)
    mirrored = manifest.mirrors(old)
    now = {module: renamed.get(module, module) for module in mirrored if module not in deleted}
    diffs = {module: text_diff(old[module], new[to], f"a/{module}", f"b/{to}") for module, to in now.items()}
    return SubtreeDiff(
        shared=tuple(module_diff(module, _api(old[module]), _api(new[to])) for module, to in now.items()),
        missing=tuple(module for module in added if module.endswith(".py")),
        ours_only=tuple(module for module in mirrored if module in deleted),
        renamed=tuple((module, to) for module, to in now.items() if module != to),
        texts={module: text for module, text in diffs.items() if text},
    )


def texts(git: Git, tree: str, suffix: str = ".py") -> dict[str, str]:
    """Path -> text of a tree's files whose name ends with ``suffix`` and that are text."""
    entries = git.files(tree).items()
    oids = {path: entry.oid for path, entry in entries if path.endswith(suffix) and entry.mode.startswith("100")}
    contents = git.blobs(list(oids.values()))
    found = {path: contents[oid] for path, oid in oids.items()}
    return {path: content.decode(errors="replace") for path, content in found.items() if b"\0" not in content}


def _api(text: str) -> dict[str, str]:
    """No names for what is no Python: an upstream's template, say."""
    try:
        return api_of(text)
    except ValueError:
        return {}


def _moves(git: Git, old_tree: str, new_tree: str) -> tuple[dict[str, str], list[str], set[str]]:
    """Renamed (old -> new), added and deleted paths."""
    fields = iter(git.fields("diff-tree", "-r", "-M", "-z", "--name-status", old_tree, new_tree))
    renamed: dict[str, str] = {}
    added: list[str] = []
    deleted: set[str] = set()
    for status in fields:
        path = next(fields)
        if status[0] == "R":
            renamed[path] = next(fields)
        elif status[0] == "A":
            added.append(path)
        elif status[0] == "D":
            deleted.add(path)
    return renamed, added, deleted
