"""For plug-ins alone: copies of remote files and folders on this machine (upstream: ``verl.utils.fs``).

Remote are the paths of ``hdfs_io``. What is local is used where it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.utils.hdfs_io import copy, exists, makedirs

__all__ = [
    "copy",
    "copy_local_path_from_hdfs",
    "copy_to_local",
    "copy_to_shm",
    "exists",
    "get_local_temp_path",
    "is_non_local",
    "local_mkdir_safe",
    "makedirs",
    "md5_encode",
    "verify_copy",
]

_PREFIX = "hdfs://"
_RECORD = ".directory_record.txt"  # in a folder that was copied: what is in it
_SHARED_MEMORY = Path("/dev/shm")


def is_non_local(path: str) -> bool:
    return path.startswith(_PREFIX)


def md5_encode(path: str) -> str:
    """The hexadecimal MD5 digest of a path, as a name for its copy."""
    return hashlib.md5(path.encode(), usedforsecurity=False).hexdigest()


def get_local_temp_path(hdfs_path: str, cache_dir: str) -> str:
    """``cache_dir/<digest of the path>/<its last part>``; the folder is made."""
    folder = Path(cache_dir) / md5_encode(hdfs_path)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / os.path.basename(hdfs_path))


def verify_copy(src: str, dest: str) -> bool:
    """Whether ``dest`` has the files of ``src``, each of the same size."""
    source, target = Path(src), Path(dest)
    if not source.exists() or not target.exists():
        return False
    if source.is_file():
        return target.is_file() and source.stat().st_size == target.stat().st_size
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    return all(
        (target / name).is_file() and (target / name).stat().st_size == (source / name).stat().st_size for name in files
    )


def copy_to_shm(src: str) -> str:
    """A copy of a local file or folder in /dev/shm, under a name that depends on its path; made once."""
    root = Path(os.path.abspath(src))
    dest = _SHARED_MEMORY / "verl-cache" / md5_encode(str(root)) / root.name
    if not verify_copy(str(root), str(dest)):
        dest.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _copy_local(root, dest)
    return str(dest)


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """The local path of ``src``, which is copied from HDFS if it lies there.

    Args:
        src: a path here or in HDFS.
        cache_dir: where copies are kept; by default the machine's folder for temporary files.
        filelock: the end of the name of the lock that makes processes wait for the one that copies.
        verbose: print what is copied.
        always_recopy: replace a copy that is there.
        use_shm: copy a local file or folder to /dev/shm too, where it is read faster.
    """
    path = copy_local_path_from_hdfs(src, cache_dir, filelock, verbose, always_recopy)
    return copy_to_shm(path) if use_shm and os.path.exists(path) else path


def copy_local_path_from_hdfs(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
) -> str:
    """``copy_to_local`` without shared memory. ValueError for an HDFS path with a slash at its end."""
    if not is_non_local(src):
        return src
    if src.endswith("/"):
        raise ValueError(f"{src} ends with a slash; give the folder's name without it")
    folder = cache_dir or tempfile.gettempdir()
    os.makedirs(folder, exist_ok=True)
    path = get_local_temp_path(src, folder)
    with _locked(Path(folder) / f"{md5_encode(src)}{filelock}"):
        if always_recopy and os.path.exists(path):
            _remove(Path(path))
        record = os.path.join(path, _RECORD)
        if os.path.isfile(record) and not _check_directory_structure(path, record):
            _remove(Path(path))  # an entry is missing, or there are others
        if not os.path.exists(path):
            if verbose:
                print(f"copying {src} to {path}")
            copy(src, path)
            if os.path.isdir(path):
                _record_directory_structure(path)
    return path


def local_mkdir_safe(path: str) -> str:
    """Makes a folder and its parents, whichever of several processes is first; its absolute path."""
    full = os.path.abspath(path)
    os.makedirs(full, exist_ok=True)
    return full


def _record_directory_structure(folder_path: str) -> str:
    """Writes the names of all files and folders below ``folder_path`` to a file in it; the path of that file."""
    record = os.path.join(folder_path, _RECORD)
    with open(record, "w", encoding="utf-8") as file:
        file.write("".join(f"{entry}\n" for entry in _entries_below(folder_path)))
    return record


def _check_directory_structure(folder_path: str, record_file: str) -> bool:
    """Whether the folder has the files and folders that ``record_file`` lists, and no others."""
    with open(record_file, encoding="utf-8") as file:
        return file.read().splitlines() == _entries_below(folder_path)


def _entries_below(folder: str) -> list[str]:
    root = Path(folder)
    found = (path for path in root.rglob("*") if path.relative_to(root) != Path(_RECORD))
    return sorted(f"{'dir' if path.is_dir() else 'file'}:{path.relative_to(root)}" for path in found)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _copy_local(source: Path, dest: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, dest, dirs_exist_ok=True)
    else:
        shutil.copy2(source, dest)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
