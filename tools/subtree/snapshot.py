"""The recorded API of an upstream's pinned version: names and signatures of what we mirror, facts and no code."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.subtree.api import public_api
from tools.subtree.compare import SubtreeDiff, against, modules, our_folder
from tools.subtree.manifest import FOLDER, ROOT, Manifest

OPTIONS = "options"  # in place of a module: the upstream's options by name, from its documentation


@dataclass(frozen=True)
class Snapshot:
    """Module path -> public name -> signature, at one version."""

    pin: str
    modules: Mapping[str, Mapping[str, str]]


def path_of(name: str) -> str:
    """The snapshot's file below the repository's root."""
    return f"{FOLDER}/api/{name}.txt"


def load(name: str, root: Path = ROOT) -> Snapshot | None:
    """The recorded API of one upstream; None when none was recorded."""
    path = root / path_of(name)
    return parse(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else None


def record(manifest: Manifest, upstream: Path, pin: str, root: Path = ROOT) -> Snapshot:
    """The API of those mirrored modules that ``upstream`` has, the folder that ours mirrors, and that are Python.

    What was recorded of modules of an older tag, and of options, stays.
    """
    theirs = modules(upstream)
    found = {}
    for module in manifest.mirrors(theirs):
        with suppress(ValueError):  # a template, a test's bad example
            found[module] = public_api(theirs[module])
    old = load(manifest.name, root)
    kept = (*manifest.older, *([OPTIONS] if manifest.options else []))  # no version has them any longer, or no source
    before = {module: dict(old.modules[module]) for module in kept if module in old.modules} if old else {}
    return Snapshot(pin, before | found)


def compare(manifest: Manifest, snapshot: Snapshot, root: Path = ROOT) -> SubtreeDiff:
    """Our mirrored modules and options beside the recorded API."""
    ours = modules(our_folder(manifest, root))
    mine = {module: public_api(ours[module]) for module in manifest.mirrors(ours)}
    theirs = snapshot.modules.get(OPTIONS, {})
    if manifest.options:
        mine[OPTIONS] = {name: theirs.get(name, "") for name in manifest.options}
    return against(mine, snapshot.modules)


def render(name: str, snapshot: Snapshot) -> str:
    """The snapshot's file."""
    lines = [
        f"# Public names and signatures of {name} at the pin below, of the modules that we mirror: facts, no code.",
        f"# `python -m tools.subtree import {name}` records it from a checkout. A `=` says that there is a default.",
        f"pin {snapshot.pin}",
    ]
    for module, names in sorted(snapshot.modules.items()):
        lines += ["", f"## {module}", *(f"{symbol} {signature}" for symbol, signature in names.items())]
    return "\n".join(lines) + "\n"


def parse(text: str, source: str) -> Snapshot:
    """The snapshot in ``text``; ValueError names the first line that is not in order."""
    pin, found = "", dict[str, dict[str, str]]()
    current: dict[str, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("pin "):
            pin = line.removeprefix("pin ").strip()
        elif line.startswith("## "):
            current = found.setdefault(line.removeprefix("## ").strip(), {})
        elif line.strip() and not line.startswith("#"):
            symbol, _, signature = line.partition(" ")
            if current is None or not signature:
                raise ValueError(f"{source}:{number}: expected `name signature` below a `## module` line, not '{line}'")
            current[symbol] = signature
    if not pin:
        raise ValueError(f"{source}: no line `pin <version>`")
    return Snapshot(pin, found)
