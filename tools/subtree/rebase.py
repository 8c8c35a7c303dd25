"""Says what a new version of an upstream changes in what we mirror, and records an upstream's API and pin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hf_formats.files import write_text
from tools.subtree import compare, configs, manifest, snapshot, upstream
from tools.subtree.compare import Entry, SubtreeDiff
from tools.subtree.keys import changes
from tools.subtree.manifest import Manifest
from tools.subtree.snapshot import Snapshot


@dataclass(frozen=True)
class Outcome:
    """What a rebase found."""

    changes: SubtreeDiff
    old: str  # versions, for people
    new: str
    sources: str
    keys: tuple[Entry, ...] = ()


def rebase(root: Path, item: Manifest, tag: str, spec: str | None) -> Outcome:
    """What ``tag`` changes in what we mirror, and in the keys that we accept; nothing is written.

    A git upstream or a released package has both versions; of any other kind ``spec`` is the new one, compared with the
    recorded API. ValueError when the upstream has no such version, or when there is nothing to compare it with.
    """
    with upstream.checkout(item, spec, tag) as new:
        if new.has_versions:
            with upstream.checkout(item, spec, item.version) as old:
                found = compare.between(old.folder, new.folder, _with_shared(item, root, old.folder))
                keys = [configs.defaults(side.folder, item.configs) for side in (old, new)] if item.configs else []
            sources = f"{old.source}, beside {new.source}"
            return Outcome(found, item.version, tag, sources, tuple(changes(*keys)) if keys else ())
        recorded = snapshot.load(item.name, root)
        if recorded is None:
            raise ValueError(
                f"{snapshot.path_of(item.name)} is not there and {spec} has one version only: "
                f"record the pinned one first with `python -m tools.subtree import {item.name} --upstream ...`"
            )
        found = compare.against(recorded.modules, snapshot.record(item, new.folder, tag, root).modules)
        sources = f"{new.source}, beside the recorded API of {recorded.pin}: neither texts nor keys are compared"
        return Outcome(found, recorded.pin, tag, sources)


def _with_shared(item: Manifest, root: Path, old: Path) -> Manifest:
    """The manifest, as if it mirrored every module of ours that the upstream's old version has too."""
    ours = compare.modules(root / item.subtree) if item.subtree else {}
    shared = (module for module in compare.modules(old) if module in ours)
    return replace(item, mirrored=tuple(dict.fromkeys((*item.mirrored, *shared))))


def record_api(root: Path, item: Manifest, tag: str | None, spec: str | None) -> tuple[Snapshot, str, list[str]]:
    """Write the API snapshot of the mirrored modules, and with ``tag`` the new pin; nothing is committed.

    Returns the API, where it came from, and the paths that were written.

    ValueError when the upstream lacks a mirrored module: the manifest would not be true.
    """
    pin = tag or item.version
    with upstream.checkout(item, spec, pin) as found:
        recorded = snapshot.record(item, found.folder, pin, root)
    absent = [module for module in item.mirrored_paths if module not in recorded.modules]
    if absent:
        raise ValueError(f"{found.source} has no {', '.join(absent)}: correct 'mirrored' in {item.path} first")
    written = {snapshot.path_of(item.name): snapshot.render(item.name, recorded)}
    if tag and tag != item.version:
        text = (root / item.path).read_text(encoding="utf-8")
        written[item.path] = manifest.with_pin(text, tag, found.commit)
    for path, text in written.items():
        write_text(root / path, text)
    return recorded, found.source, list(written)
