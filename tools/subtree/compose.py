"""Puts a new version of a subtree into the repository: first as git objects, then in one move into the working tree."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.subtree import fork, manifest, move, snapshot, upstream
from tools.subtree.git import Git
from tools.subtree.manifest import FOLDER, Manifest
from tools.workshop import adaptations

SUBMODULE = "160000"
LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")


def require_clean(git: Git) -> None:
    """ValueError when the working tree has changes, a merge waits, or git does not know who commits."""
    if git.top() != git.folder.resolve():
        raise ValueError(f"{git.folder} is not the top of its repository: run this in {git.top()}")
    waiting = [name for name in ("MERGE_HEAD", "CHERRY_PICK_HEAD", "rebase-merge") if git.git_path(name).exists()]
    if waiting:
        raise ValueError(f"a merge is in progress ({waiting[0]}): finish it with `git commit`, or `git merge --abort`")
    dirty = [line[3:] for line in git.fields("status", "--porcelain", "-z", "--untracked-files=no")]
    if dirty:
        shown = ", ".join(dirty[:5]) + (" ..." if len(dirty) > 5 else "")
        raise ValueError(f"the tree has {len(dirty)} uncommitted change(s): {shown}; commit or `git stash` them first")
    git.text("var", "GIT_COMMITTER_IDENT")


def composed(git: Git, base: str, folder: str, tree: str, files: Mapping[str, str]) -> str:
    """``base`` with ``folder`` replaced by ``tree`` ("" leaves it) and with text files written; a tree object."""
    with git.scratch() as scratch:
        index = Git(git.folder, scratch / "index")
        index.run("read-tree", base)
        if folder:
            there = index.run("ls-files", "-z", "--", f"{folder}/").stdout
            index.run("update-index", "-z", "--force-remove", "--stdin", stdin=there)
            index.run("read-tree", f"--prefix={folder}/", tree)
        index.set_entries(f"100644 {git.write_blob(text.encode())}\t{path}" for path, text in files.items())
        return index.text("write-tree")


def with_adaptations(git: Git, tree: str) -> tuple[str, list[str]]:
    """The tree with its list of adaptations brought up to date, and what is wrong with its marks."""
    if git.tree_of(tree, adaptations.OUTPUT.parent.as_posix()) is None:
        return tree, []
    with git.scratch() as scratch:
        root = upstream.export(git, tree, scratch)
        try:
            adaptations.run(root, check=False)
        except ValueError as error:
            return tree, [str(error)]
        text = (root / adaptations.OUTPUT).read_text(encoding="utf-8")
    return composed(git, tree, "", "", {adaptations.OUTPUT.as_posix(): text}), []


def move_in(
    git: Git, stage: Path, tree: str, squash: str, message: str, waits: fork.Merge | None, folder: str
) -> str | None:
    """Make ``tree`` the next commit, a merge of HEAD and ``squash``, and bring the working tree to it, in one move.

    With ``waits`` nothing is committed: the merge is left in progress, with its conflicts in the index, as `git merge`
    does, so that `git commit` finishes it and `git merge --abort` takes it back. Returns the commit, if one was made.
    """
    head = str(git.commit("HEAD"))
    commit = None if waits else git.commit_tree(tree, [head, squash], message)
    new, old = _changed(git, head, tree)
    _refuse_to_overwrite(git, new, old)
    index_file = git.git_path("index")
    shutil.copy2(index_file, stage / "index.old")
    shutil.copy2(index_file, stage / "index.new")
    index = Git(git.folder, stage / "index.new")
    index.run("read-tree", "-m", tree)
    index.checkout(new, stage / "new")  # as a checkout would write them
    if waits:
        _mark_conflicts(index, waits, folder)
        texts = {"MERGE_MSG": message, "MERGE_MODE": "no-ff", "MERGE_HEAD": squash + "\n"}
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
    require_clean(git)  # nothing changed while this was prepared
    subject = message.splitlines()[0]
    move.start(git, stage, move.Plan(head, commit, squash, new, old, f"tools.subtree: {subject}"))
    return commit


def _changed(git: Git, head: str, tree: str) -> tuple[dict[str, str], dict[str, str]]:
    """Path -> blob of the files to write, and of those that are there now, where the two trees differ."""
    fields = git.fields("diff-tree", "-r", "-z", "--no-renames", head, tree)
    new, old = {}, {}
    for facts, path in zip(fields[::2], fields[1::2], strict=True):
        old_mode, new_mode, old_blob, new_blob, status = facts.removeprefix(":").split()
        if status != "A" and old_mode != SUBMODULE:
            old[path] = old_blob
        if status != "D" and new_mode != SUBMODULE:
            new[path] = new_blob
    return new, old


def _refuse_to_overwrite(git: Git, new: Iterable[str], old: Iterable[str]) -> None:
    """ValueError when a file that git does not know is at, above or below the path of a new one."""
    added = set(new) - set(old)
    above = {parent.as_posix() for path in added for parent in Path(path).parents}
    tops = sorted({path.split("/")[0] for path in added})
    others = git.fields("ls-files", "-z", "--others", "--", *tops) if tops else []
    found = [
        path
        for path in others
        if path in added | above or any(parent.as_posix() in added for parent in Path(path).parents)
    ]
    if found:
        raise ValueError(
            f"files that git does not know are in the way: {', '.join(found[:5])}; move them elsewhere first"
        )


def _mark_conflicts(index: Git, merge: fork.Merge, folder: str) -> None:
    paths = sorted({path for *_, path in merge.stages})
    lines = [f"0 {'0' * 40}\t{folder}/{path}" for path in paths]
    lines += [f"{mode} {blob} {number}\t{folder}/{path}" for mode, blob, number, path in merge.stages]
    index.set_entries(lines)


def fetch_version(
    git: Git, item: Manifest, manifest_text: str, tag: str, spec: str | None
) -> tuple[str, dict[str, str]]:
    """Fetch a version of an upstream: the commit here whose tree is the mirrored folder, and its files of third_party/.

    These are the manifest with the new pin, the API snapshot and the upstream's licence files, text by path.
    """
    source = upstream.repository(item, spec)
    if source is None:
        raise ValueError(
            f"{spec} is no git repository: {item.subtree}/ holds its upstream's files, and needs its commits"
        )
    commit = upstream.resolve(source, tag, spec or item.url)
    split = fork.fetch_split(git, source, commit, item.upstream_root)
    with git.scratch() as scratch:
        recorded = snapshot.record(item, upstream.export(git, f"{split}^{{tree}}", scratch), tag)
    files = {
        item.path: manifest.with_pin(manifest_text, tag, commit),
        snapshot.path_of(item.name): snapshot.render(item.name, recorded),
    }
    if item.upstream_root:  # a folder that is taken alone would come without the licence files at the root
        names = source.fields("ls-tree", "-z", "--name-only", commit)
        for name in [name for name in names if name.upper().startswith(LICENCE_FILES)]:
            files[f"{FOLDER}/licences/{item.name}/{name}"] = source.text("show", f"{commit}:{name}") + "\n"
    return split, files
