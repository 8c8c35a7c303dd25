"""Files that appear complete or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary neighbour of ``path``, sync it to disk, then rename it into place.

    OSError where ``path`` is no file: a folder, or a device, which a rename would replace.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EISDIR if path.is_dir() else errno.EINVAL, "no file can be written there", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.tmp{secrets.token_hex(4)}")  # process ids repeat on other nodes
    try:
        write(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """``write_atomically`` for a UTF-8 text."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
