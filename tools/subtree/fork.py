"""A subtree that holds its upstream's files: what git's history says of it, and the three-way merge of a new version.

The commits have the form of ``git subtree --squash``: a squash commit, whose tree is the upstream's folder and whose
message ends with the trailers ``git-subtree-dir`` and ``git-subtree-split``, is merged into the branch. So plain
``git subtree pull``, ``merge`` and ``split`` go on working, and what they made is understood here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tools.subtree.git import MERGE_TREE, Git

TRAILER = re.compile(r"^git-subtree-(dir|split|mainline): *(\S+) *$", re.MULTILINE)


@dataclass(frozen=True)
class Squash:
    """The newest version of the upstream that was merged into a subtree."""

    commit: str  # here; its tree is the upstream's folder
    split: str  # the upstream's commit with that tree


@dataclass(frozen=True)
class Conflict:
    """What git could not decide about a file."""

    path: str  # below the subtree
    kind: str  # "contents", "modify/delete", "rename/delete", ...
    message: str  # git's


@dataclass(frozen=True)
class Merge:
    """A merged subtree, as a tree object with git's conflict markers in it."""

    tree: str
    conflicts: tuple[Conflict, ...]
    stages: tuple[tuple[str, str, str, str], ...]  # mode, blob, stage (1 base, 2 ours, 3 theirs), path


def find_squash(git: Git, folder: str) -> Squash | None:
    """The newest squash commit of ``folder`` that HEAD reaches; None when the folder holds no upstream's files."""
    if git.commit("HEAD") is None:
        return None
    words = ("log", "--no-show-signature", "-z", "--fixed-strings", f"--grep=git-subtree-dir: {folder}")
    for entry in git.fields(*words, "--format=%H%n%s%n%B", "HEAD"):
        commit, subject, message = (entry + "\n\n").split("\n", 2)
        trailers = dict(TRAILER.findall(message))
        if trailers.get("dir", "").rstrip("/") != folder or "split" not in trailers:
            continue
        if "mainline" not in trailers:
            return Squash(commit, trailers["split"])
        if subject.startswith("Add "):  # added with its history; a rejoined split holds our changes and is no base
            return Squash(trailers["split"], trailers["split"])
    return None


def fetch_split(git: Git, source: Git, commit: str, root: str) -> str:
    """Fetch the commit of ``source`` whose tree is its folder ``root``: itself, or what ``git subtree split`` makes.

    A split has the same id wherever it is made. It needs the upstream's whole history; ``source`` is only read.
    """
    if not root:
        git.run("fetch", "--quiet", "--no-tags", str(source.folder.resolve()), commit)
        return commit
    if source.tree_of(commit, root) is None:
        raise ValueError(f"commit {commit[:12]} of {source.folder} has no folder '{root}'")
    with git.scratch() as scratch:
        clone = Git(scratch / "clone")
        source.run("clone", "--quiet", "--no-checkout", "--shared", ".", str(clone.folder))
        (clone.folder / root).mkdir(parents=True)
        split = clone.text("subtree", "split", "-q", f"--prefix={root}", commit).splitlines()[-1]
        git.run("fetch", "--quiet", "--no-tags", str(clone.folder), split)
    return split


def squash(git: Git, folder: str, tree: str, split: str, before: Squash | None) -> str:
    """The squash commit of a new version; no branch moves."""
    if before:
        subject = f"Squashed '{folder}/' changes from {before.split[:9]}..{split[:9]}"
    else:
        subject = f"Squashed '{folder}/' content from commit {split[:9]}"
    message = f"{subject}\n\ngit-subtree-dir: {folder}\ngit-subtree-split: {split}\n"
    return git.commit_tree(tree, [before.commit] if before else [], message)


def merge(git: Git, ours_tree: str, base: str, theirs: str, ours_name: str, theirs_name: str) -> Merge:
    """Three-way merge of ``ours_tree`` and the commit ``theirs``, a child of the commit ``base``; touches no files.

    Renames are followed. A file that one side deleted and the other changed stays, as a conflict. Conflict markers are
    labelled with the two names.
    """
    if git.version() < MERGE_TREE:
        raise ValueError(
            f"git {'.'.join(map(str, MERGE_TREE))} or newer is needed to merge, this is {git.text('version')}"
        )
    ours = git.commit_tree(ours_tree, [base], f"{ours_name} before the merge\n")
    done = git.run(
        "-c", "merge.renames=true", "merge-tree", "--write-tree", "--messages", "-z", ours, theirs, ok=(0, 1)
    )
    head, _, messages = done.stdout.decode(errors="surrogateescape").partition("\0\0")
    tree, *entries = head.split("\0")
    stages = []
    for entry in entries:
        facts, path = entry.split("\t", 1)
        mode, oid, number = facts.split()
        stages.append((mode, oid, number, path))
    labels = {ours: ours_name, theirs: theirs_name}
    conflicts = tuple(_conflicts(messages, labels)) if done.returncode else ()
    return Merge(_relabelled(git, tree, {path for *_, path in stages}, labels), conflicts, tuple(stages))


def _conflicts(messages: str, labels: dict[str, str]) -> list[Conflict]:
    """The conflicts among merge-tree's messages (number of paths, the paths, kind, text), with names for commit ids."""
    fields, found = messages.split("\0"), []
    while len(fields) > 3 and fields[0].isdigit():
        count = int(fields[0])
        path, kind, message = fields[1], fields[1 + count], fields[2 + count].strip()
        fields = fields[3 + count :]
        if kind.startswith("CONFLICT"):
            for oid, name in labels.items():
                message = message.replace(oid, name)
            message = re.sub(r"^CONFLICT \([^)]*\): ", "", message)
            found.append(Conflict(path, kind.removeprefix("CONFLICT").strip(" ()"), message))
    return found


def _relabelled(git: Git, tree: str, paths: set[str], labels: dict[str, str]) -> str:
    """The same tree with names for commit ids on the conflict markers of ``paths``."""
    files = git.files(tree)
    changed = []
    for path in sorted(paths & files.keys()):
        entry = files[path]
        content = before = git.blobs([entry.oid])[entry.oid]
        for oid, name in labels.items():
            content = re.sub(rb"^([<>]{7,}) " + oid.encode(), rb"\1 " + name.encode(), content, flags=re.MULTILINE)
        if content != before:
            changed.append(f"{entry.mode} {git.write_blob(content)}\t{path}")
    if not changed:
        return tree
    with git.scratch() as scratch:
        index = Git(git.folder, scratch / "index")
        index.run("read-tree", tree)
        index.set_entries(changed)
        return index.text("write-tree")
