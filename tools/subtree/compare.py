"""Compares two sides of a subtree, ours and the upstream's or two versions of the upstream, by public name and text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.subtree.api import api_of, public_api
from tools.subtree.git import moves
from tools.subtree.manifest import ROOT, Manifest

Entry = tuple[str, bool, str]  # of a list of work: heading, whether nothing is left to do, what changed


@dataclass(frozen=True)
class ModuleDiff:
    """Public names of one module on both sides."""

    module: str
    same: tuple[str, ...]
    differs: tuple[tuple[str, str, str], ...]  # name, our signature, the upstream's
    missing: tuple[str, ...]  # upstream only
    ours_only: tuple[str, ...]
    theirs: Mapping[str, str]  # name -> the upstream's signature


@dataclass(frozen=True)
class SubtreeDiff:
    """Two sides of a subtree: ours and the upstream's, or the upstream's old version and the new one."""

    shared: tuple[ModuleDiff, ...]
    missing: tuple[str, ...]  # modules of the second side only
    ours_only: tuple[str, ...]  # modules of the first side only
    renamed: tuple[tuple[str, str], ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)  # module -> unified diff
    gone: Mapping[str, Iterable[str]] = field(default_factory=dict)  # module of the first side only -> its names
    homes: Mapping[str, str] = field(default_factory=dict)  # name -> the one module of the second side that has it

    def counts(self) -> tuple[int, int, int, int]:
        """Names that are the same, differ, are missing, are ours only, in the shared modules."""

        def total(kind: str) -> int:
            return sum(len(getattr(item, kind)) for item in self.shared)

        return total("same"), total("differs"), total("missing"), total("ours_only")


def modules(folder: Path) -> dict[str, Path]:
    """Module path below ``folder`` ("core/parallel_state.py") -> file."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}


def status(manifest: Manifest, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """(mirrored modules that we have, mirrored modules that are not there yet)."""
    ours = modules(root / manifest.subtree) if manifest.subtree else {}
    wanted = (*manifest.mirrored_paths, *manifest.older)
    return manifest.mirrors(ours), [module for module in wanted if module not in ours]


def diff(manifest: Manifest, upstream: Path, root: Path = ROOT) -> SubtreeDiff:
    """Compare our subtree with ``upstream``, the folder of its upstream that ours mirrors."""
    ours, theirs = modules(our_folder(manifest, root)), modules(upstream)
    shared = {module: public_api(ours[module]) for module in ours.keys() & theirs.keys()}
    return against(ours | shared, theirs | {module: public_api(theirs[module]) for module in shared})


def against(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> SubtreeDiff:
    """Compare two sides by module; those that both have are APIs."""
    shared = tuple(module_diff(module, ours[module], theirs[module]) for module in ours if module in theirs)
    return SubtreeDiff(shared, tuple(m for m in theirs if m not in ours), tuple(m for m in ours if m not in theirs))


def module_diff(module: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> ModuleDiff:
    both = [name for name in ours if name in theirs]
    return ModuleDiff(
        module,
        same=tuple(name for name in both if ours[name] == theirs[name]),
        differs=tuple((name, ours[name], theirs[name]) for name in both if ours[name] != theirs[name]),
        missing=tuple(name for name in theirs if name not in ours),
        ours_only=tuple(name for name in ours if name not in theirs),
        theirs=theirs,
    )


def text_diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """A unified diff; empty when the texts are equal."""
    lines: Iterable[str] = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), old_name, new_name
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def between(old: Path, new: Path, manifest: Manifest) -> SubtreeDiff:
    """What changes between two versions of an upstream's folder in what we mirror, renames followed.

    New modules are those of the whole folder, as any of them may matter. An ``__init__.py`` stays where its folder is:
    two of them are often alike.
    """
    renamed, added, deleted = moves(old, new)
    deleted |= {module for module in renamed if module.endswith("__init__.py")}
    mirrored = manifest.mirrors(modules(old))
    now = {module: renamed.get(module, module) for module in mirrored if module not in deleted}
    sides = {module: (read(old / module), read(new / to)) for module, to in now.items()}
    diffs = {module: text_diff(*sides[module], f"a/{module}", f"b/{to}") for module, to in now.items()}
    return SubtreeDiff(
        shared=tuple(module_diff(module, *map(_api, texts)) for module, texts in sides.items()),
        missing=tuple(module for module in added if module.endswith(".py")),
        ours_only=tuple(module for module in mirrored if module in deleted),
        renamed=tuple((module, to) for module, to in now.items() if module != to),
        texts={module: text for module, text in diffs.items() if text},
        gone={module: _api(read(old / module)) for module in mirrored if module in deleted},
        homes=_homes(new),
    )


def _homes(folder: Path) -> dict[str, str]:
    """Function, class or constant -> its module, for those that one module alone has."""
    found: dict[str, list[str]] = {}
    for module, path in modules(folder).items():
        for name in _api(read(path)):
            found.setdefault(name, []).append(module)
    return {name: places[0] for name, places in found.items() if len(places) == 1}


def read(path: Path) -> str:
    """The text of a module, whatever its bytes."""
    return path.read_text(encoding="utf-8", errors="replace")


def _api(text: str) -> dict[str, str]:
    """The API of a module; no names for what is not Python, such as an upstream's template."""
    try:
        return api_of(text)
    except ValueError:
        return {}


def our_folder(manifest: Manifest, root: Path) -> Path:
    """Our folder; ValueError when only facts were taken from the upstream."""
    if not manifest.subtree:
        raise ValueError(f"{manifest.name} has no subtree here: only facts were taken from it")
    return root / manifest.subtree
