"""Finds an upstream's files: a git url (kept in a cache), a clone, a folder, an installed package, a wheel or sdist."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_formats.cache_folder import cache_folder
from tools.subtree.git import Git, GitError
from tools.subtree.manifest import Manifest

ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@contextmanager
def checkout(manifest: Manifest, spec: str | None, version: str) -> Iterator[tuple[Path, str]]:
    """The folder of the upstream that ours mirrors, at ``version`` where the upstream is a git repository; its source.

    ``spec`` is a git url, a local clone, a folder, an archive, or the name of an installed package; None is the
    manifest's url. The folder may be temporary: it is gone when the context ends. ValueError says what was expected.
    """
    with tempfile.TemporaryDirectory(prefix="subtree-") as scratch:
        tree, what = _tree(manifest, spec, version, Path(scratch))
        yield _inside(tree, manifest, spec or manifest.url), what


def repository(manifest: Manifest, spec: str | None, versions: tuple[str, ...] = ()) -> Git | None:
    """The git repository that ``spec`` names; None when that is a folder, archive or package.

    Of a url, ``versions`` alone are fetched, or all its history when there are none.
    """
    if spec is None or _is_url(spec):
        return [_cached(spec or manifest.url, version) for version in versions or (None,)][-1]
    return Git(Path(spec)) if _is_clone(Path(spec)) else None


def resolve(git: Git, version: str, source: str) -> str:
    """The commit of a tag, branch or id in a repository; ValueError lists the nearest tags when there is none."""
    commit = git.commit(f"refs/tags/{version}") or git.commit(version) or git.commit(f"refs/heads/{version}")
    if commit is None:
        tags = git.text("tag", "--list", "--sort=-version:refname", "--sort=-creatordate").splitlines()[:8]
        raise ValueError(f"{source} has no '{version}': its newest tags are {', '.join(tags) or '(none)'}")
    return commit


def export(git: Git, tree: str, target: Path) -> Path:
    """Write the plain files of a tree object below ``target``: no links, no submodules, whatever the attributes say."""
    oids = {path: entry.oid for path, entry in git.files(tree).items() if entry.mode.startswith("100")}
    contents = git.blobs(list(oids.values()))
    for path, oid in oids.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(contents[oid])
    return target


def _tree(manifest: Manifest, spec: str | None, version: str, scratch: Path) -> tuple[Path, str]:
    path = Path(spec) if spec else None
    if spec is None or _is_url(spec):
        git = _cached(spec or manifest.url, version)
    elif path and path.is_dir():
        if not _is_clone(path):
            return path, f"{path} as it is"
        git = Git(path)
    elif path and path.is_file() and path.name.endswith(ARCHIVES):
        if path.suffix in (".whl", ".zip"):
            shutil.unpack_archive(path, scratch, format="zip")
        else:
            shutil.unpack_archive(path, scratch, filter="data")
        return scratch, path.name
    else:
        return _installed(spec, manifest)
    commit = resolve(git, version, spec or manifest.url)
    return export(git, commit, scratch), f"{spec or manifest.url} at {version} ({commit[:12]})"


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


def _cached(url: str, version: str | None) -> Git:
    """A bare repository in the user's cache with ``version`` of ``url``, or with everything when it is None.

    One tag alone is fetched without history. An interrupted fetch leaves nothing that the next one cannot use.
    """
    base = cache_folder() / "r1-zero-subtree"
    folder = base / f"{Path(url.rstrip('/')).stem}-{hashlib.sha256(url.encode()).hexdigest()[:8]}.git"
    git = Git(folder)
    if not (folder / "HEAD").exists():
        base.mkdir(parents=True, exist_ok=True)
        Git(base).run("init", "--quiet", "--bare", str(folder))
    if version is not None:
        if git.commit(f"refs/tags/{version}") or (re.fullmatch("[0-9a-f]{7,40}", version) and git.commit(version)):
            return git
        try:
            git.run("fetch", "--quiet", "--no-tags", "--depth=1", url, f"+refs/tags/{version}:refs/tags/{version}")
            return git
        except GitError:  # no tag of that name: a branch or a shortened commit id, which only the whole history tells
            pass
    try:
        deepen = ["--unshallow"] if git.text("rev-parse", "--is-shallow-repository") == "true" else []
        git.run("fetch", "--quiet", "--tags", "--force", *deepen, url, "+refs/heads/*:refs/heads/*")
    except GitError as error:
        raise ValueError(
            f"cannot fetch {url}: {error}\nGive --upstream a url that this machine reaches, a local clone, a wheel or "
            "sdist, or the name of an installed package"
        ) from error
    return git


def _installed(spec: str, manifest: Manifest) -> tuple[Path, str]:
    """Where an installed package lies, by its metadata: our folders of the same name are not asked."""
    try:
        found = importlib.metadata.distribution(spec)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise ValueError(
            f"'{spec}' is no git url, folder, archive ({', '.join(ARCHIVES)}) or installed package: "
            f"expected {manifest.url} at {manifest.version} in one of these forms"
        ) from error
    return Path(str(found.locate_file(""))), f"the installed {spec} {found.version}"


def _is_url(spec: str) -> bool:
    return "://" in spec or spec.startswith("git@") or (spec.endswith(".git") and not Path(spec).exists())


def _is_clone(folder: Path) -> bool:
    """Whether a folder is itself a repository; a plain folder inside of one is not."""
    return (folder / ".git").exists() or ((folder / "HEAD").is_file() and (folder / "objects").is_dir())
