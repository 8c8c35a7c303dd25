"""What a new version of an upstream changes in the modules that we mirror."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.subtree.api import api_of
from tools.subtree.compare import Api, ModuleDiff, module_diff, text_diff
from tools.subtree.git import Git
from tools.subtree.manifest import Manifest


@dataclass(frozen=True)
class Changes:
    """Old version to new version, in what we mirror."""

    api: tuple[ModuleDiff, ...]  # of the modules with a change; "ours" is the old version, "theirs" the new one
    deleted: tuple[str, ...]  # modules
    added: tuple[str, ...]  # modules of the whole folder, as any of them may matter
    renamed: tuple[tuple[str, str], ...]
    texts: Mapping[str, str] = field(default_factory=dict)  # module -> unified diff

    def is_empty(self) -> bool:
        return not (self.api or self.deleted or self.added or self.renamed or self.texts)


def between(git: Git, old_tree: str, new_tree: str, manifest: Manifest) -> Changes:
    """The changes between two trees of a repository, renames followed."""
    renamed, added, deleted = _moves(git, old_tree, new_tree)
    old, new = texts(git, old_tree), texts(git, new_tree)
    where = dict(renamed)
    mirrored = [module for module in manifest.mirrors(old) if module not in deleted]
    pairs = [(module, where.get(module, module)) for module in mirrored]
    api = [module_diff(module, _api(old[module]), _api(new[now])) for module, now in pairs]
    diffs = {module: text_diff(old[module], new[now], f"a/{module}", f"b/{now}") for module, now in pairs}
    return Changes(
        tuple(item for item in api if item.differs or item.missing or item.ours_only),
        tuple(module for module in manifest.mirrors(old) if module in deleted),
        tuple(module for module in added if module.endswith(".py")),
        tuple((module, now) for module, now in pairs if module != now),
        {module: text for module, text in diffs.items() if text},
    )


def from_snapshot(old: Api, new: Api) -> Changes:
    """The changes of the API alone, when the old version's files are not at hand."""
    api = [module_diff(module, old[module], new[module]) for module in old if module in new]
    return Changes(
        tuple(item for item in api if item.differs or item.missing or item.ours_only),
        tuple(module for module in old if module not in new),
        tuple(module for module in new if module not in old),
        (),
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


def _moves(git: Git, old_tree: str, new_tree: str) -> tuple[list[tuple[str, str]], list[str], set[str]]:
    """Renamed (old, new), added and deleted paths."""
    fields = git.fields("diff-tree", "-r", "-M", "-z", "--name-status", old_tree, new_tree)
    renamed: list[tuple[str, str]] = []
    added: list[str] = []
    deleted: set[str] = set()
    position = 0
    while position < len(fields):
        status, path = fields[position], fields[position + 1]
        position += 3 if status[0] in "RC" else 2
        if status[0] == "R":
            renamed.append((path, fields[position - 1]))
        elif status[0] == "A":
            added.append(path)
        elif status[0] == "D":
            deleted.add(path)
    return renamed, added, deleted
