"""Takes an upstream's API or files, and moves a subtree to a new version: by a three-way merge where it holds files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hf_formats.files import write_text
from tools.subtree import compare, compose, fork, guards, manifest, move, snapshot, upstream
from tools.subtree.compare import SubtreeDiff
from tools.subtree.git import Git
from tools.subtree.manifest import Manifest
from tools.subtree.snapshot import Snapshot


@dataclass(frozen=True)
class Outcome:
    """What a rebase found and did."""

    changes: SubtreeDiff
    old: str  # versions, for people
    new: str
    is_fork: bool
    conflicts: tuple[fork.Conflict, ...] = ()  # paths are the repository's
    findings: tuple[str, ...] = ()  # what a merge of text cannot see: why it was not committed
    notes: tuple[str, ...] = ()
    commit: str | None = None  # made; None when nothing was, or when the merge waits for a person
    is_waiting: bool = False  # the merge is in the working tree, not committed


def rebase(root: Path, name: str, tag: str, spec: str | None, dry_run: bool = False) -> Outcome:
    """Show what ``tag`` changes in what we mirror; in a fork, merge it as one commit or leave the conflicts staged.

    ValueError, and nothing changed, when the tree is not clean or the upstream has no such version.
    """
    item = manifest.load(name, root / manifest.FOLDER)
    git = Git(root)
    before = fork.find_squash(git, item.subtree) if item.subtree else None
    if before is None:
        shallow = git.run("rev-parse", "--is-shallow-repository", ok=(0, 128)).stdout.strip() == b"true"
        notes = ("a shallow clone: whether the folder holds the upstream's files, only the whole history says",)
        outcome = _report(root, item, tag, spec)
        return replace(outcome, notes=outcome.notes + notes) if shallow else outcome
    compose.require_clean(git)
    with move.stage(git) as folder:
        pinned = git.text("show", f"HEAD:{item.path}")
        split, files = compose.fetch_version(git, item, pinned, tag, spec)
        found = compare.between(git, f"{before.commit}^{{tree}}", f"{split}^{{tree}}", item)
        outcome = Outcome(found, f"{item.version} ({before.split[:9]})", f"{tag} ({split[:9]})", True)
        if split == before.split:
            return replace(outcome, notes=(f"{name} holds {tag} already",))
        return _merge(git, item, tag, (before, split), files, outcome, None if dry_run else folder)


def _merge(
    git: Git,
    item: Manifest,
    tag: str,
    versions: tuple[fork.Squash, str],
    files: Mapping[str, str],
    outcome: Outcome,
    stage: Path | None,
) -> Outcome:
    """Merge in git's object store, look at the result, and move it in; ``stage`` None only looks."""
    before, split = versions
    ours = git.tree_of("HEAD", item.subtree)
    if ours is None:
        raise ValueError(
            f"the folder '{item.subtree}' is not in the last commit: `import {item.name} --files` takes it"
        )
    squash = fork.squash(git, item.subtree, f"{split}^{{tree}}", split, before)
    merged = fork.merge(git, ours, before.commit, squash, "ours", f"{item.name} {tag}")
    tree = compose.composed(git, "HEAD", item.subtree, merged.tree, files)
    findings = _findings(git, item, (f"{before.commit}^{{tree}}", ours, merged.tree), tree)
    if not merged.conflicts:
        tree, wrong_marks = compose.with_adaptations(git, tree)
        findings += wrong_marks
    conflicts = tuple(replace(c, path=f"{item.subtree}/{c.path}") for c in merged.conflicts)
    outcome = replace(outcome, conflicts=conflicts, findings=tuple(findings), notes=_notes(item, outcome.changes))
    if stage is None:
        return outcome
    waits = merged if conflicts or findings else None
    message = f"Rebase {item.name} onto {tag}\n\n{item.subtree}/ held {item.version} ({before.split[:9]}).\n"
    commit = compose.move_in(git, stage, tree, squash, message, waits, item.subtree)
    return replace(outcome, commit=commit, is_waiting=commit is None)


def _findings(git: Git, item: Manifest, folder_trees: tuple[str, str, str], tree: str) -> list[str]:
    base, ours, merged = (compare.texts(git, oid, suffix="") for oid in folder_trees)
    own = guards.lost_lines(base, ours, merged) + guards.cut_blocks(ours, merged)
    broken = guards.broken_names(compare.texts(git, "HEAD"), compare.texts(git, tree))
    return [f"{item.subtree}/{line}" for line in own] + broken


def _notes(item: Manifest, found: SubtreeDiff) -> tuple[str, ...]:
    moved = [f"{old} is {new} now" for old, new in found.renamed if old in item.mirrored_paths]
    gone = [f"{module} is gone" for module in found.ours_only if module in item.mirrored_paths]
    return tuple(f"{what}: correct 'mirrored' in {item.path}" for what in moved + gone)


def _report(root: Path, item: Manifest, tag: str, spec: str | None) -> Outcome:
    """What the new version changes for a folder whose code is our own: nothing to merge."""
    source = upstream.repository(item, spec, (item.version, tag))
    if source is not None:
        old, new = (_folder_tree(source, item, version, spec) for version in (item.version, tag))
        return Outcome(compare.between(source, old, new, item), item.version, tag, False)
    recorded = snapshot.load(item.name, root)
    if recorded is None:
        raise ValueError(
            f"{snapshot.path_of(item.name)} is not there and {spec} has one version only: "
            f"record the pinned one first with `python -m tools.subtree import {item.name} --upstream ...`"
        )
    with upstream.checkout(item, spec, tag) as (folder, what):
        api = snapshot.record(item, folder, tag).modules
        note = f"{what}: compared with the recorded API of {recorded.pin} only, not by text"
    return Outcome(compare.against(recorded.modules, api), item.version, tag, False, notes=(note,))


def _folder_tree(source: Git, item: Manifest, version: str, spec: str | None) -> str:
    tree = source.tree_of(upstream.resolve(source, version, spec or item.url), item.upstream_root)
    if tree is None:
        raise ValueError(f"{spec or item.url} has no folder '{item.upstream_root}' at {version}")
    return tree


def record_api(root: Path, item: Manifest, tag: str | None, spec: str | None) -> tuple[Snapshot, str, list[str]]:
    """Write the API snapshot of the mirrored modules, and with ``tag`` the new pin; nothing is committed.

    Returns the API, where it came from, and the paths that were written.

    ValueError when the upstream lacks a mirrored module: the manifest would not be true.
    """
    pin = tag or item.version
    with upstream.checkout(item, spec, pin) as (folder, what):
        recorded = snapshot.record(item, folder, pin)
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
        write_text(root / path, text)
    return recorded, what, list(written)


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
    with move.stage(git) as folder:
        split, files = compose.fetch_version(git, item, manifest_text, tag, spec)
        squash = fork.squash(git, item.subtree, f"{split}^{{tree}}", split, None)
        tree = compose.composed(git, "HEAD", item.subtree, f"{split}^{{tree}}", files)
        message = f"Take {item.name} {tag} as {item.subtree}/\n\nFrom {item.url}, licence {item.licence}.\n"
        return str(compose.move_in(git, folder, tree, squash, message, None, item.subtree))
