"""Says what a new version of an upstream changes in what we mirror, and records an upstream's API and pin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hf_formats.files import write_text
from tools.subtree import compare, manifest, snapshot, upstream
from tools.subtree.compare import SubtreeDiff
from tools.subtree.manifest import Manifest
from tools.subtree.snapshot import Snapshot


@dataclass(frozen=True)
class Outcome:
    """What a rebase found."""

    changes: SubtreeDiff
    old: str  # versions, for people
    new: str
    notes: tuple[str, ...] = ()


def rebase(root: Path, item: Manifest, tag: str, spec: str | None) -> Outcome:
    """What ``tag`` changes in what we mirror; nothing is written.

    A git upstream has both versions; of any other kind ``spec`` is the new one, compared with the recorded API.
    ValueError when the upstream has no such version, or when there is nothing to compare it with.
    """
    with upstream.checkout(item, spec, tag) as new:
        if new.commit:
            with upstream.checkout(item, spec, item.version) as old:
                found = compare.between(old.folder, new.folder, item)
            return Outcome(found, item.version, tag, _corrections(item, found))
        recorded = snapshot.load(item.name, root)
        if recorded is None:
            raise ValueError(
                f"{snapshot.path_of(item.name)} is not there and {spec} has one version only: "
                f"record the pinned one first with `python -m tools.subtree import {item.name} --upstream ...`"
            )
        found = compare.against(recorded.modules, snapshot.record(item, new.folder, tag).modules)
        note = f"{new.source}: compared with the recorded API of {recorded.pin} only, not by text"
        return Outcome(found, item.version, tag, (note, *_corrections(item, found)))


def _corrections(item: Manifest, found: SubtreeDiff) -> tuple[str, ...]:
    """What is to be corrected in the manifest."""
    moved = [f"{old} is {new} now" for old, new in found.renamed if old in item.mirrored_paths]
    gone = [f"{module} is gone" for module in found.ours_only if module in item.mirrored_paths]
    return tuple(f"{what}: correct 'mirrored' in {item.path}" for what in moved + gone)


def record_api(root: Path, item: Manifest, tag: str | None, spec: str | None) -> tuple[Snapshot, str, list[str]]:
    """Write the API snapshot of the mirrored modules, and with ``tag`` the new pin; nothing is committed.

    Returns the API, where it came from, and the paths that were written.

    ValueError when the upstream lacks a mirrored module: the manifest would not be true.
    """
    pin = tag or item.version
    with upstream.checkout(item, spec, pin) as found:
        recorded = snapshot.record(item, found.folder, pin)
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
