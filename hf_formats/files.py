"""Files that appear whole or not at all, and removal that never ends a run."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` atomically: after a crash ``path`` holds all of it or what it held before.

    One process at a time may write a path: what a killed one left beside it is written over by the next.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Make a file's content, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_remove(path: Path) -> bool:
    """Remove a file or folder that is not needed any more; where that fails, warn and return False.

    Somebody may have it open (network file systems then keep ``.nfs`` files in a folder) or may not allow it. That is
    no reason to end what runs here.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # goes on behind a file that stays
            left = next((one for one in path.rglob("*") if not one.is_dir()), path) if path.exists() else None
            reason = "" if left is None else f"{left} stays, is it in use?"
        else:
            path.unlink(missing_ok=True)
            reason = ""
    except OSError as error:
        reason = str(error)
    if reason:
        logger.warning("%s could not be removed and is left: %s", path, reason)
    return not reason
