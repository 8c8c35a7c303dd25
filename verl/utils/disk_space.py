"""A disk that is full: which errors say so, and the line that names the disk and what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

FULL_BYTES = 2**20  # so little is left of a disk on which logs and metrics could not be written

_CODES = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = tuple(os.strerror(code) for code in _CODES)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether ``error``, or one that it came from, is that of a full disk; another process's error is a text."""
    while error is not None:
        if getattr(error, "errno", None) in _CODES or tells_of_full_disk(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def tells_of_full_disk(text: str) -> bool:
    """Whether the system's words for a full disk or a used-up quota are in ``text``."""
    return any(words in text for words in _TEXTS)


def disk_full_line(folders: Iterable[Path]) -> str:
    """The line about the disk of that one of ``folders`` which has the least space left."""
    folder = min(map(_existing, folders), key=_free_bytes)
    disk = next(parent for parent in (folder, *folder.parents) if os.path.ismount(parent))
    usage = shutil.disk_usage(folder)
    return (
        f"the disk at {disk} is full ({usage.free / 2**20:.1f} of {usage.total / 2**20:.0f} MiB are free now), and "
        f"{folder} is on it: make room there; trainer.max_actor_ckpt_to_keep says how many checkpoints are kept"
    )


def has_full_disk(folders: Iterable[Path]) -> bool:
    """Whether one of ``folders`` is on a disk with no room for anything."""
    return any(_free_bytes(_existing(folder)) < FULL_BYTES for folder in folders)


def _existing(folder: Path) -> Path:
    """``folder``, or the nearest one above it that exists."""
    absolute = folder.expanduser().absolute()
    return next(parent for parent in (absolute, *absolute.parents) if parent.exists())


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
