"""Compares one of our subtrees with a checkout of its upstream, by module path and by public name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.subtree.api import public_api
from tools.subtree.manifest import ROOT, Manifest


@dataclass(frozen=True)
class ModuleDiff:
    """Public names of one module on both sides."""

    module: str
    same: tuple[str, ...]
    differs: tuple[tuple[str, str, str], ...]  # name, our signature, the upstream's
    missing: tuple[str, ...]  # upstream only
    ours_only: tuple[str, ...]


@dataclass(frozen=True)
class SubtreeDiff:
    """Module paths on both sides, and the names of those that both have."""

    shared: tuple[ModuleDiff, ...]
    missing: tuple[str, ...]  # in the upstream only
    ours_only: tuple[str, ...]


def modules(folder: Path) -> dict[str, Path]:
    """Module path below ``folder`` ("core/parallel_state.py") -> file."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}


def status(manifest: Manifest, root: Path = ROOT) -> tuple[list[str], list[str]]:
    """(mirrored modules that we have, mirrored modules that are not there yet)."""
    ours = modules(root / manifest.subtree) if manifest.subtree else {}
    present = [module for module in manifest.mirrored if module in ours]
    return present, [module for module in manifest.mirrored if module not in ours]


def diff(manifest: Manifest, upstream: Path, root: Path = ROOT) -> SubtreeDiff:
    """Compare our subtree with the upstream checked out at ``upstream``.

    ValueError when the manifest mirrors nothing or ``upstream`` is no checkout of it.
    """
    if not manifest.subtree:
        raise ValueError(f"{manifest.name} has no subtree here: only facts were taken from it")
    theirs_root = upstream / manifest.upstream_root
    if not theirs_root.is_dir():
        raise ValueError(
            f"{upstream} has no folder '{manifest.upstream_root}': expected a checkout of {manifest.url} "
            f"at {manifest.version}"
        )
    ours, theirs = modules(root / manifest.subtree), modules(theirs_root)
    shared = tuple(_module_diff(module, ours[module], theirs[module]) for module in ours if module in theirs)
    return SubtreeDiff(
        shared, tuple(module for module in theirs if module not in ours), tuple(m for m in ours if m not in theirs)
    )


def _module_diff(module: str, ours: Path, theirs: Path) -> ModuleDiff:
    mine, upstream = public_api(ours), public_api(theirs)
    both = [name for name in mine if name in upstream]
    return ModuleDiff(
        module,
        same=tuple(name for name in both if mine[name] == upstream[name]),
        differs=tuple((name, mine[name], upstream[name]) for name in both if mine[name] != upstream[name]),
        missing=tuple(name for name in upstream if name not in mine),
        ours_only=tuple(name for name in mine if name not in upstream),
    )
