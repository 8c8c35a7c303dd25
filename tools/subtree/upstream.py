"""Finds an upstream's files: a git url (kept in a cache), a clone, a folder, an installed package, a wheel or sdist."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hf_formats.cache_folder import cache_folder
from tools.subtree.git import GitError, commit_of, git
from tools.subtree.manifest import Manifest

ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


class Checkout(NamedTuple):
    """An upstream's files at one version."""

    folder: Path  # the one that ours mirrors
    source: str  # where the files came from, for people
    commit: str  # of a git upstream; "" of the other kinds, which have one version only


@contextmanager
def checkout(manifest: Manifest, spec: str | None, version: str) -> Iterator[Checkout]:
    """The files of an upstream, at ``version`` where it is a git repository.

    ``spec`` is a git url, a local clone, a folder, an archive, or the name of an installed package; None is the
    manifest's url. The folder may be temporary: it is gone when the context ends. ValueError says what was expected.
    """
    with tempfile.TemporaryDirectory(prefix="subtree-") as scratch:
        tree, source, commit = _tree(manifest, spec or manifest.url, version, Path(scratch).resolve())
        yield Checkout(_inside(tree, manifest, spec or manifest.url), source, commit)


def _tree(manifest: Manifest, spec: str, version: str, scratch: Path) -> tuple[Path, str, str]:
    path = Path(spec)
    if _is_url(spec):
        repository = _cached(spec, version)
    elif path.is_dir():
        if not _is_clone(path):
            return path.resolve(), f"{path} as it is", ""
        repository = path
    elif path.is_file() and path.name.endswith(ARCHIVES):
        if path.suffix in (".whl", ".zip"):
            shutil.unpack_archive(path, scratch, format="zip")
        else:
            _unpack_tar(path, scratch)
        return scratch, path.name, ""
    else:
        return _installed(spec, manifest)
    commit = _resolve(repository, version, spec)
    tree = scratch / "tree"
    tree.mkdir()
    words = ("-c", "core.symlinks=false", f"--work-tree={tree}", "read-tree", "-u", "--reset", commit)
    git(repository, *words, GIT_INDEX_FILE=str(scratch / "index"))
    return tree, f"{spec} at {version} ({commit[:12]})", commit


def _resolve(repository: Path, version: str, source: str) -> str:
    """The commit of a tag, branch or id in a repository; ValueError lists the nearest tags when there is none."""
    for name in (f"refs/tags/{version}", version, f"refs/heads/{version}"):
        if commit := commit_of(repository, name):
            return commit
    tags = git(repository, "tag", "--list", "--sort=-version:refname", "--sort=-creatordate").splitlines()[:8]
    raise ValueError(f"{source} has no '{version}': its newest tags are {', '.join(tags) or '(none)'}")


def _unpack_tar(archive: Path, target: Path) -> None:
    """Write the plain files of a tar archive below ``target``, no links. tarfile's filters came with Python 3.11.4."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = target / member.name
            if ".." in path.parts or Path(member.name).is_absolute():
                raise ValueError(
                    f"{archive} has {member.name!r}, which lies outside of the archive: it is not unpacked"
                )
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def _inside(tree: Path, manifest: Manifest, source: str) -> Path:
    """The mirrored folder of a checkout or of an unpacked archive; an sdist has one folder around everything."""
    entries = list(tree.iterdir()) if tree.is_dir() else []
    if len(entries) == 1 and entries[0].is_dir() and entries[0].name != manifest.upstream_root.split("/")[0]:
        tree = entries[0]
    folder = tree / manifest.upstream_root
    if not folder.is_dir():
        raise ValueError(
            f"{source} has no folder '{manifest.upstream_root}': expected a checkout of {manifest.url} "
            f"at {manifest.version}"
        )
    return folder


def _cached(url: str, version: str) -> Path:
    """A bare repository in the user's cache with ``version`` of ``url``.

    One tag alone is fetched without history. An interrupted fetch leaves nothing that the next one cannot use.
    """
    name = f"{Path(url.rstrip('/')).stem}-{hashlib.sha256(url.encode()).hexdigest()[:8]}.git"
    folder = cache_folder() / "r1-zero-subtree" / name
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--bare")
    tag = f"refs/tags/{version}"
    if commit_of(folder, tag) or (re.fullmatch("[0-9a-f]{7,40}", version) and commit_of(folder, version)):
        return folder
    try:
        git(folder, "fetch", "--quiet", "--no-tags", "--depth=1", url, f"+{tag}:{tag}")
        return folder
    except GitError:  # no tag of that name: a branch or a shortened commit id, which only the whole history tells
        pass
    try:
        deepen = ["--unshallow"] if git(folder, "rev-parse", "--is-shallow-repository") == "true" else []
        git(folder, "fetch", "--quiet", "--tags", "--force", *deepen, url, "+refs/heads/*:refs/heads/*")
    except GitError as error:
        raise ValueError(
            f"cannot fetch {url}: {error}\nGive --upstream a url that this machine reaches, a local clone, a wheel or "
            "sdist, or the name of an installed package"
        ) from error
    return folder


def _installed(spec: str, manifest: Manifest) -> tuple[Path, str, str]:
    """Where an installed package lies, by its metadata: our folders of the same name are not asked."""
    try:
        found = importlib.metadata.distribution(spec)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise ValueError(
            f"'{spec}' is no git url, folder, archive ({', '.join(ARCHIVES)}) or installed package: "
            f"expected {manifest.url} at {manifest.version} in one of these forms"
        ) from error
    return Path(str(found.locate_file(""))), f"the installed {spec} {found.version}", ""


def _is_url(spec: str) -> bool:
    return "://" in spec or spec.startswith("git@") or (spec.endswith(".git") and not Path(spec).exists())


def _is_clone(folder: Path) -> bool:
    """Whether a folder is itself a repository; a plain folder inside of one is not."""
    return (folder / ".git").exists() or ((folder / "HEAD").is_file() and (folder / "objects").is_dir())
