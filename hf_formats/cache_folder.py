"""The folder of what may be made again, such as compiled kernels, for users whose home cannot hold it too."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Libraries that look for their caches elsewhere than in XDG_CACHE_HOME -> their part of the folder.
_OTHERS = {
    "MPLCONFIGDIR": "matplotlib",
    "TRITON_CACHE_DIR": "triton",
    "MODELSCOPE_CACHE": "modelscope",
    "ASCEND_CACHE_PATH": "ascend",
    "ASCEND_WORK_PATH": "ascend",
}


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """XDG_CACHE_HOME, else ~/.cache; a private folder below TMPDIR where no library can be written there and loaded.

    Raises:
        ValueError: somebody else owns that folder.
    """
    wanted = _wanted(environment)
    return wanted if wanted is not None and _holds_libraries(wanted) else _private_folder()


def moved_caches(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that bring all caches into ``cache_folder``; none where the user's own serves."""
    wanted, folder = _wanted(environment), cache_folder(environment)
    if folder == wanted:
        return {}
    others = {name: str(folder / part) for name, part in _OTHERS.items() if not environment.get(name)}
    return {"XDG_CACHE_HOME": str(folder), **others}


def _wanted(environment: Mapping[str, str]) -> Path | None:
    given = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(given) if os.path.isabs(given) else None  # a user without a home has ~ itself; XDG ignores the others


def loads_libraries(folder: Path) -> bool:
    """Whether the file system of ``folder`` is one from which programs and libraries may be loaded (no ``noexec``)."""
    return not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)


def _holds_libraries(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # its parent is another user's, a read-only disk, or no folder
        return False
    return os.access(folder, os.W_OK | os.X_OK) and loads_libraries(folder)


def _private_folder() -> Path:
    """A folder that nobody else can put a library into."""
    folder = Path(tempfile.gettempdir()) / f"r1-zero-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ValueError(f"{folder} is not a folder that you alone can write to: remove it, or set XDG_CACHE_HOME")
    return folder
