"""What a rebase leaves to do, as a list that a person can tick off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.subtree.api import public_api
from tools.subtree.compare import Entry, SubtreeDiff, modules
from tools.subtree.keys import ADDED, DEFAULTS, DROPPED, RENAMED
from tools.subtree.manifest import Manifest
from tools.subtree.rebase import Outcome

MODULES, GONE = "Modules that moved or are gone", "Names that are gone"
CHANGED, NEW = "Signatures that changed", "New names"
HEADINGS = (MODULES, GONE, CHANGED, NEW, RENAMED, DEFAULTS, ADDED, DROPPED)


def listed(item: Manifest, outcome: Outcome, root: Path) -> str:
    """The list in Markdown: names, then keys, what is left to do before what is not, and the counts."""
    ours = _Ours(root / item.subtree if item.subtree else None)
    groups = {heading: list[tuple[bool, str]]() for heading in HEADINGS}
    for entries in (_modules(item, outcome.changes, ours), _names(item, outcome.changes, ours), outcome.keys):
        for heading, is_done, text in entries:
            groups[heading].append((is_done, text))
    lines = [f"# {item.name}: {outcome.old} -> {outcome.new}", "", f"{outcome.sources}. A ticked line needs nothing."]
    for heading, group in groups.items():
        num_open = sum(not is_done for is_done, _ in group)
        lines += ["", f"## {heading}: {len(group)}, {num_open} to do", ""] if group else []
        lines += [f"- [{'x' if is_done else ' '}] {text}" for is_done, text in sorted(group, key=lambda pair: pair[0])]
    every = [is_done for group in groups.values() for is_done, _ in group]
    counts = f"{len(every)} changes: {every.count(False)} to do, {every.count(True)} that need nothing."
    return "\n".join([*lines, "", counts if every else "Nothing changes in what we mirror.", ""])


def _modules(item: Manifest, found: SubtreeDiff, ours: _Ours) -> Iterator[Entry]:
    moves = {module: f"`{module}` is `{new}` now" for module, new in found.renamed}
    gone = {module: f"`{module}` is gone" for module in found.ours_only}
    for module, text in (moves | gone).items():
        if module.endswith("__init__.py") and not found.gone.get(module):
            continue
        text += "".join(f"; `{name}`{_now(found, name)}" for name in found.gone.get(module, ()) if _now(found, name))
        correct = f"; correct `mirrored` in {item.path}" if module in item.mirrored else ""
        here = f"ours: {ours.name}/{module}" if module in ours.apis else "not here"
        is_done = not correct and (module in item.older or module not in ours.apis)
        yield MODULES, is_done, f"{text}; {here}{correct}"


def _names(item: Manifest, found: SubtreeDiff, ours: _Ours) -> Iterator[Entry]:
    """Names of mirrored modules; of other modules that both trees have, those names that ours has."""
    for shared in found.shared:
        module, theirs = shared.module, shared.theirs
        changes = [(GONE, name, _now(found, name)) for name in shared.ours_only]
        changes += [(CHANGED, name, _difference(old, new)) for name, old, new in shared.differs]
        changes += [(NEW, name, f" `{theirs[name]}`") for name in shared.missing]
        for heading, name, what in changes:
            where, mine = ours.find(module, name)
            is_done = bool(where) if heading == NEW else not where or mine == theirs.get(name)
            shown = f" `{mine}`" if heading == CHANGED and not mine.startswith("class") else ""
            if where or item.mirrors([module]):
                here = f"ours: {where}{shown}" if where else "not here"
                yield heading, is_done, f"`{module}`: `{name}`{what}; {here}"


def _now(found: SubtreeDiff, name: str) -> str:
    """Where the new version has a name that left its module; empty when nowhere, or in several modules."""
    return f" is in `{found.homes[name]}` now" if name in found.homes and "." not in name else ""


def _difference(old: str, new: str) -> str:
    """Both signatures; of two classes the fields that are gained and lost."""
    if not (old.startswith("class") and new.startswith("class")):
        return f" `{old}` -> `{new}`"
    before, after = (set(text.removeprefix("class").strip("()").split(", ")) - {""} for text in (old, new))
    kinds = (("gains", after - before), ("loses", before - after))
    return "".join(f"; {verb} `{'`, `'.join(sorted(names))}`" for verb, names in kinds if names)


class _Ours:
    """Where our folder has a public name, by its own module and elsewhere."""

    def __init__(self, folder: Path | None) -> None:
        self.name = folder.name if folder else ""
        self.apis = {module: public_api(path) for module, path in modules(folder).items()} if folder else {}

    def find(self, module: str, name: str) -> tuple[str, str]:
        """(file that defines the name, its signature there); the module itself is asked first. Empty: nowhere."""
        for place in (module, *self.apis):
            if name in self.apis.get(place, {}):
                return f"{self.name}/{place}", self.apis[place][name]
        return "", ""
