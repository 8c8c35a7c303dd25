"""Files that appear whole or not at all, and removal that never ends a run."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def write_atomically(path: Path, write: Callable[[Path], object], is_durable: bool = True) -> None:
    """Let ``write`` fill a temporary neighbour of ``path``, then rename it into place; missing folders are made.

    After a crash ``path`` holds all of it or what it held before, and it is on the disk when this returns unless
    ``is_durable`` is False, for files that only living processes read. OSError where ``path`` is no file: a folder, or
    a device, which a rename would replace.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EISDIR if path.is_dir() else errno.EINVAL, "no file can be written there", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.tmp{secrets.token_hex(4)}")  # process ids repeat on other nodes
    try:
        write(temporary)
        if is_durable:
            sync_path(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if is_durable:
        sync_path(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """``write_atomically`` for bytes."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def write_text(path: Path, text: str, is_durable: bool = True) -> None:
    """``write_atomically`` for a UTF-8 text."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), is_durable)


def write_json(path: Path, value: Any) -> None:
    """``write_text`` of ``value`` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


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
