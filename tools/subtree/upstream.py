"""Finds an upstream's files: a git url or a released package (both kept in a cache), a clone, a folder, an archive, an
installed package.
"""

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
from tools.download_package import download_wheel
from tools.subtree.git import GitError, commit_of, git
from tools.subtree.manifest import Manifest

INDEX = "pypi:"  # before the name of a released package
PROBE_LIMIT_S, DOWNLOAD_LIMIT_S = 15.0, 120.0
ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


class Checkout(NamedTuple):
    """An upstream's files at one version."""

    folder: Path  # the one that ours mirrors
    source: str  # where the files came from, for people
    commit: str  # of a git upstream; "" of the other kinds
    has_versions: bool  # whether other versions are had in the same way


@contextmanager
def checkout(manifest: Manifest, spec: str | None, version: str) -> Iterator[Checkout]:
    """The files of an upstream, at ``version`` where it is a git repository or a released package.

    ``spec`` is a git url, ``pypi:`` and the name of a released package, a local clone, a folder, an archive, or the
    name of an installed package. None is the manifest's url, or its package where the url cannot be reached. The folder
    may be temporary: it is gone when the context ends. ValueError says what was expected.
    """
    with tempfile.TemporaryDirectory(prefix="subtree-") as scratch:
        why = ""
        if spec is None and manifest.package and not _is_at_hand(manifest.url, version):
            spec, why = f"{INDEX}{manifest.package}", f" ({manifest.url} cannot be reached)"
        spec = spec or manifest.url
        tree, source, commit = _tree(manifest, spec, version, Path(scratch).resolve())
        yield Checkout(_inside(tree, manifest, spec), source + why, commit, bool(commit) or spec.startswith(INDEX))


def _tree(manifest: Manifest, spec: str, version: str, scratch: Path) -> tuple[Path, str, str]:
    path = Path(spec)
    if spec.startswith(INDEX):
        wheel = _released(spec.removeprefix(INDEX), version)
        shutil.unpack_archive(wheel, scratch, format="zip")
        return scratch, f"{wheel.name} of the package index", ""
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
    folder, tag = _repository(url), f"refs/tags/{version}"
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--bare")
    if _holds(folder, version):
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


def _repository(url: str) -> Path:
    name = f"{Path(url.rstrip('/')).stem}-{hashlib.sha256(url.encode()).hexdigest()[:8]}.git"
    return _cache() / name


def _holds(repository: Path, version: str) -> bool:
    is_commit = re.fullmatch("[0-9a-f]{7,40}", version)
    return bool(commit_of(repository, f"refs/tags/{version}") or (is_commit and commit_of(repository, version)))


def _is_at_hand(url: str, version: str) -> bool:
    """Whether the cache has the version, or the url answers."""
    repository = _repository(url)
    if _is_clone(repository) and _holds(repository, version):
        return True
    try:
        git(Path.cwd(), "ls-remote", "--quiet", url, "HEAD", limit_s=PROBE_LIMIT_S)
        return True
    except GitError:
        return False


def _released(name: str, tag: str) -> Path:
    """The wheel of a released package at the version that ``tag`` ends in, from the cache or the package index."""
    version = re.search(r"\d+(\.\w+)+$", tag)
    if version is None or not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"{name} at '{tag}' is no released package: expected a name, and a tag that ends in a version")
    if found := next(_cache().glob(f"{name.replace('-', '_')}-{version[0]}-*.whl"), None):
        return found
    _cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=_cache()) as scratch:
        wheel = download_wheel(f"{name}=={version[0]}", Path(scratch), DOWNLOAD_LIMIT_S)
        return wheel.rename(_cache() / wheel.name)


def _cache() -> Path:
    return cache_folder() / "r1-zero-subtree"


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
